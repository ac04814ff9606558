"""The fingerprint in LMCache's namespace: who shares it, agreement, length, versions.

E and P are cases met in the field.
"""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename
from vllm.v1.worker.logical_blocks import digest

from lmcache_hook import namespace
from lmcache_hook.namespace import CONTRACT_VERSION, Fingerprint
from tests.unit.hook import engines
from tests.unit.overlay import pools

A, B = "a" * 64, "b" * 64


# ==============================
# The engine
# ==============================


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return engines.save_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config(model: str) -> Any:
    return engines.configure(model)


def layers(*specs: Any, first: int = 0) -> dict[str, Any]:
    return {f"model.layers.{first + i}": spec for i, spec in enumerate(specs)}


def full(heads: int = 2, dtype: torch.dtype = torch.bfloat16, size: int = 8) -> Any:
    return pools.full(32, num_kv_heads=heads, head_size=size, dtype=dtype)


def states() -> Any:
    page = full().page_size_bytes
    shapes, dtypes = [(6,), (4, 4)], [torch.bfloat16, torch.float32]
    return pools.mamba(32, shapes, dtypes, page_size_padded=page)


def test_e1_which_layers_are_quantized(config: Any) -> None:
    """bf16 and fp8 layers of one page size, other ones skipped by index."""
    wide, narrow = full(), full(size=16, dtype=torch.uint8)
    assert wide.page_size_bytes == narrow.page_size_bytes
    here = engines.engine(config, [layers(wide, narrow, wide, narrow)])
    there = engines.engine(config, [layers(wide, wide, narrow, narrow)])
    assert digest(here) != digest(there)


def test_e2_a_draft_layer_of_the_same_spec(config: Any) -> None:
    latent = pools.mla(64, 576)
    here = engines.engine(config, [layers(*3 * [latent])], mla_only=True)
    there = engines.engine(config, [layers(*4 * [latent])], mla_only=True)
    assert digest(here) != digest(there)


def test_e3_twice_the_layers(config: Any) -> None:
    four = layers(states(), states(), states(), full())
    eight = four | layers(states(), states(), states(), full(), first=4)
    assert digest(engines.engine(config, [four])) != digest(
        engines.engine(config, [eight])
    )


def test_e4_pipeline_and_context_ranks_of_one_size(config: Any) -> None:
    """MLA at TP 8: two pipeline stages of two layers, or two shards of one's tokens."""
    latent = pools.mla(64, 576)
    stages = [8 * [layers(latent, latent)], 8 * [layers(latent, latent, first=2)]]
    split: dict[str, Any] = {"tensor_parallel_size": 8, "mla_only": True}
    pipeline = engines.engine(
        config, [*stages[0], *stages[1]], pipeline_parallel_size=2, **split
    )
    context = engines.engine(config, stages[0], decode_context_parallel_size=2, **split)
    assert pipeline["pages"] == context["pages"]
    assert pipeline["ranks"] == context["ranks"] == [0, 0]
    assert digest(pipeline) != digest(context)


def test_e5_interleaved_tokens(config: Any) -> None:
    ranks = 8 * [layers(states(), full())]
    digests = {
        digest(
            engines.engine(
                config,
                ranks,
                tensor_parallel_size=8,
                decode_context_parallel_size=dcp,
                cp_kv_cache_interleave_size=interleave,
            )
        )
        for dcp, interleave in ((1, 1), (8, 1), (8, 16))
    }
    assert len(digests) == 3


def test_latent_pages_are_the_same_on_every_tensor_parallel_rank(config: Any) -> None:
    """LMCache keeps one piece of them, so engines of any such size share it."""
    ranks = [layers(pools.mla(64, 576))]
    documents = [
        engines.engine(config, n * ranks, mla_only=True, tensor_parallel_size=n)
        for n in (1, 4)
    ]
    assert documents[0] == documents[1]


def test_e8_another_model_at_one_path(model: str, config: Any) -> None:
    """What is overridden, quantized or trained anew below one path."""
    ranks = [layers(full())]
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    others = [
        engines.configure(model, hf_overrides={"rope_parameters": rope}),
        engines.configure(model, hf_overrides={"rms_norm_eps": 0.1}),
        engines.configure(model, dtype="float32"),
        engines.configure(model, revision="main"),
    ]
    digests = {digest(engines.engine(c, ranks)) for c in (config, *others)}
    assert len(digests) == 1 + len(others)


def test_weights_replaced_below_one_path(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = engines.save_config(tmp_path)
    said = set()
    for seed in (0, 1, 1):
        torch.manual_seed(seed)
        save_file({"weight": torch.randn(64, 64)}, tmp_path / "model.safetensors")
        said.add(digest(engines.engine(engines.configure(path), [layers(full())])))
    assert len(said) == 2


def test_the_two_fp8_formats(model: str) -> None:
    digests = [
        digest(
            engines.engine(engines.configure(model, kv_cache_dtype=t), [layers(full())])
        )
        for t in ("fp8", "fp8_e4m3", "fp8_e5m2")
    ]
    assert digests[0] == digests[1] != digests[2]


def test_scales_found_at_run_time_are_one_engines_own(model: str) -> None:
    said = set()
    for _ in range(2):
        config = engines.configure(model)
        config.cache_config.calculate_kv_scales = True
        said.add(digest(engines.engine(config, [layers(full())])))
    assert len(said) == 2


def test_e10_what_engines_that_share_may_differ_in(model: str, config: Any) -> None:
    ranks = [layers(full())]
    other = engines.configure(
        model,
        max_model_len=32,
        served_model_name="other",
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.5,
        num_gpu_blocks_override=77,
        seed=7,
        enforce_eager=True,
        max_num_seqs=3,
    )
    renamed = {f"language_model.{name}": s for name, s in ranks[0].items()}
    assert engines.engine(config, ranks) == engines.engine(other, [renamed])


def test_draft_models_are_told_apart(model: str, tmp_path: Path) -> None:
    """Their layers hold their own values, in pages of the same form."""
    ranks = [layers(full())]
    said = [digest(engines.engine(engines.configure(model), ranks))]
    for i, theta in enumerate((1e4, 1e5)):
        rope = {"rope_type": "default", "rope_theta": theta}
        drafter = engines.save_config(tmp_path / str(i), rope_parameters=rope)
        speculation = {
            "model": drafter,
            "method": "draft_model",
            "num_speculative_tokens": 2,
        }
        config = engines.configure(model, speculative_config=speculation)
        said.append(digest(engines.engine(config, ranks)))
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    config = engines.configure(model, speculative_config=ngram)
    assert len(set(said)) == 3
    assert digest(engines.engine(config, ranks)) == said[0], "n-grams have no layers"


# ==============================
# Pipeline parallel
# ==============================


def pipeline(config: Any, *ranks: dict[str, Any]) -> dict[str, Any]:
    return engines.engine(config, [*ranks], pipeline_parallel_size=len(ranks))


def test_p1_and_p5_the_partition_counts(config: Any) -> None:
    """The same model cut elsewhere keeps other layers in one object."""
    even = pipeline(config, layers(*4 * [full()]), layers(*4 * [full()], first=4))
    again = pipeline(config, layers(*4 * [full()]), layers(*4 * [full()], first=4))
    odd = pipeline(config, layers(*5 * [full()]), layers(*3 * [full()], first=5))
    assert even == again
    assert digest(even) != digest(odd)


def test_p2_a_drafter_of_other_heads_on_the_last_rank(config: Any) -> None:
    drafter = {"draft.layers.0": full(4)}
    said = pipeline(config, layers(full()), layers(full(), first=1) | drafter)
    assert said["ranks"] == [0, 1]


def test_p3_head_counts_met_in_another_order(config: Any) -> None:
    said = pipeline(config, layers(full(1), full(2)), layers(full(2), full(1), first=2))
    assert said["ranks"] == [0, 1]


def test_p4_a_rank_without_a_layer_of_one_group(config: Any) -> None:
    window = pools.attention("SlidingWindowSpec", 32, head_size=8, sliding_window=64)
    with pytest.raises(ValueError, match="No layer on rank 1 of group 1: ") as error:
        pipeline(config, layers(full(), window, window), layers(full(), first=3))
    assert "--pipeline-parallel-size" in str(error.value)


def test_ranks_of_one_piece_must_agree(config: Any) -> None:
    latent = [
        engines.documents(config, [layers(pools.mla(64, width))])[0]
        for width in (576, 512)
    ]
    strategy = SimpleNamespace(mla_only=True, n_servers=1)
    with pytest.raises(ValueError, match="Rank 1 pages piece 0 .* differently"):
        namespace.document(config, strategy, [(0, latent[0]), (0, latent[1])])


specs = st.sampled_from(
    [full(1), full(2), full(2, torch.uint8, 16), states(), pools.mla(32, 32)]
)
some_ranks = st.lists(
    st.lists(specs, min_size=1, max_size=4), min_size=1, max_size=3
).map(lambda ranks: [layers(*rank, first=10 * i) for i, rank in enumerate(ranks)])


@settings(deadline=None, max_examples=60)
@given(here=some_ranks, there=some_ranks, seed=st.integers(0, 9))
def test_equal_documents_mean_equal_layers(
    config: Any, here: list[Any], there: list[Any], seed: int
) -> None:
    """For random specs, layer orders and ranks: every layer counts, names do not."""

    def said(ranks: list[Any]) -> Any:
        try:
            return digest(pipeline(config, *ranks))
        except (ValueError, NotImplementedError, AssertionError):
            return None  # groups that vLLM does not plan, or a rank without one

    one, other = said(here), said(there)
    assume(one is not None)
    if one == other:
        assert [[*rank.values()] for rank in here] == [
            [*rank.values()] for rank in there
        ]
    rng = random.Random(seed)
    prefix = f"language_model.{rng.random()}."
    renamed = [{prefix + name: s for name, s in rank.items()} for rank in here]
    assert said(renamed) == one


# ==============================
# Its name
# ==============================


def test_namespaces_have_file_names_on_a_disk_tier() -> None:
    snapshot = "/models/" + "m" * 60 + "/snapshots/" + "0123456789" * 4 + "/v"
    for path in (snapshot, "m" * 130, "d/" * 200 + "m" * 300, "a@b/c@d", "模型" * 90):
        name = namespace.name(path, A)
        key = ObjectKey(bytes(32), name, 0xFFFFFFFF, 0xFF, cache_salt="s" * 32)
        assert len(_object_key_to_filename(key).encode()) <= 255
        assert name.endswith("##logical-" + A[:16])
    assert namespace.name(snapshot, A).startswith("v-")
    assert namespace.name("Qwen/Qwen3.5", A) == "Qwen/Qwen3.5##logical-" + A[:16]


digests = st.text("0123456789abcdef", min_size=64, max_size=64)
paths = st.text("abc/-_.@", min_size=1, max_size=300)


@given(paths, paths, digests, digests)
def test_one_name_a_model_and_fingerprint(a: str, b: str, one: str, two: str) -> None:
    same = (a, one[:16]) == (b, two[:16])
    assert (namespace.name(a, one) == namespace.name(b, two)) == same


# ==============================
# Agreement
# ==============================


def workers(*digests: str) -> dict[tuple[int, int], Fingerprint]:
    return {(0, i): Fingerprint(d, CONTRACT_VERSION) for i, d in enumerate(digests)}


def test_workers_that_agree() -> None:
    assert namespace.agree(workers(A, A, A, A)) == A


def test_workers_that_disagree_are_named_with_their_fingerprints() -> None:
    with pytest.raises(ValueError, match="not in one LMCache namespace") as e:
        namespace.agree(workers(A, B, A))
    assert f"{A} on workers [(0, 0), (0, 2)]" in str(e.value)
    assert f"{B} on workers [(0, 1)]" in str(e.value)


def test_worker_of_another_contract_version() -> None:
    other = {0: Fingerprint(A, CONTRACT_VERSION + 1)}
    with pytest.raises(RuntimeError, match=f"follow contract {CONTRACT_VERSION + 1}"):
        namespace.agree(other)


def test_another_connectors_handshake() -> None:
    with pytest.raises(RuntimeError, match="brought object instead of a fingerprint"):
        namespace.agree({0: object()})


def test_hook_and_overlay_follow_one_contract() -> None:
    from vllm.v1.worker import logical_blocks

    assert logical_blocks.CONTRACT_VERSION == CONTRACT_VERSION
