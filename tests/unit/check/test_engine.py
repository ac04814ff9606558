"""vLLM's flags, the prompts, the connector's config."""

import pytest
from vllm.config import KVTransferConfig

from vllm_patches.check import audit, engine

JOB = engine.Job("/folder", 7777, [], "AuditedLogicalConnector", 1)


def test_flags_are_vllm_s_own() -> None:
    args = engine.parse(
        ["--model", "some/model", "-tp", "2", "--kv-cache-dtype=fp8", "--max-model-len"]
        + ["4k", "--speculative-config.method", "ngram", "--enable_prefix_caching"]
    )
    assert (args.model, args.tensor_parallel_size) == ("some/model", 2)
    assert (args.kv_cache_dtype, args.max_model_len) == ("fp8", 4000)
    assert args.speculative_config == {"method": "ngram"}
    assert args.enable_prefix_caching


def test_an_unknown_flag_is_refused_in_vllm_s_words(capsys) -> None:
    with pytest.raises(SystemExit) as refused:
        engine.parse(["--model", "some/model", "--no-such-flag", "1"])
    assert refused.value.code == 2
    last = capsys.readouterr().err.strip().split("\n")[-1]
    assert last == (
        "vllm-patches check: error: unrecognized arguments: --no-such-flag 1"
    )


def test_the_user_s_transfer_config_stays_but_for_the_server() -> None:
    given = KVTransferConfig(
        kv_connector="LMCacheMPConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "lmcache.mp.host": "tcp://production",
            "lmcache.mp.port": 5555,
            "lmcache.mp.server_urls": "tcp://production:5555",
            "lmcache.mp.autostart": True,
            "lmcache.mp.autostart.server_args": "--l1-size-gb 100",
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    )
    config = engine.transfer_config(given, JOB)
    assert (config.kv_connector, config.kv_role) == (JOB.connector, "kv_both")
    assert config.kv_connector_module_path == audit.__name__
    assert config.kv_connector_extra_config == {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": 7777,
        "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        engine.FOLDER: "/folder",
    }
    extra = engine.transfer_config(None, JOB).kv_connector_extra_config
    assert extra["lmcache.mp.port"] == 7777


@pytest.mark.parametrize(
    "chunk, block", [(256, 16), (544, 544), (1600, 1600), (256, 1)]
)
def test_prompts_are_cut_inside_a_block_behind_whole_chunks(
    chunk: int, block: int
) -> None:
    prompts = engine.make_prompts(chunk, block, 512)
    assert [len(prompt) // chunk for prompt in prompts] == [3, 4, 5]
    assert all(0 < len(prompt) % chunk <= max(1, block - 1) for prompt in prompts)
    assert all(128 <= token < 384 for prompt in prompts for token in prompt)
    assert prompts == engine.make_prompts(chunk, block, 512), "the same in every engine"
    assert len({tuple(prompt[:chunk]) for prompt in prompts}) == 3
