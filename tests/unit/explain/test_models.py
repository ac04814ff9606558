"""What explain says of models, held against numbers that are worked out by hand."""

from pathlib import Path

import pytest
from torch import distributed
from vllm.platforms import current_platform

from scripts.engines import models
from tests.unit.explain.configs import MODELS
from tests.unit.explain.table import MARKERS, README, table
from vllm_patches import releases
from vllm_patches.explain import Options, explain

_ITEM = 2
"""Bytes of a bfloat16."""


@pytest.fixture
def tell(tmp_path: Path):
    """Explain a family of tiny models."""

    def tell(family: str, **options):
        return explain(models.make_config(family, tmp_path), Options(**options))

    return tell


def test_a_hybrid_on_kernel_blocks(tell) -> None:
    told = tell("hybrid", kernel_block_sizes=(32,), block_size=256)
    page = 256 * 2 * 2 * 64 * _ITEM
    assert [group.kind for group in told.groups] == [*["MambaSpec"] * 3] + [
        "FullAttentionSpec"
    ]
    for group in told.groups:
        assert (group.layers, group.block_size) == ([1], 256)
        assert group.page_size_bytes == page
    mamba, full = told.groups[0], told.groups[-1]
    conv = 3 * (2 * 2 * 64 + 4 * 64) * _ITEM
    ssm = page - conv - mamba.padding_bytes
    assert ssm in (4 * 64 * 64 * _ITEM, 4 * 64 * 64 * 4)
    assert [(part.name, part.offset, part.size) for part in mamba.parts] == [
        ("conv", 0, conv),
        ("ssm", conv, ssm),
        ("padding", conv + ssm, mamba.padding_bytes),
    ]
    assert (mamba.kernel_block_size, mamba.k) == (256, 1)
    assert (full.kernel_block_size, full.k, full.padding_bytes) == (32, 8, 0)
    assert [part.offset for part in full.parts] == [i * page // 8 for i in range(8)]
    assert full.view is not None and full.view_bytes == page
    assert [part.size for part in full.entry] == [64 * _ITEM] * 2
    assert told.chunk_size == 256
    kept = sum(group.view_bytes for group in told.groups)
    assert told.bytes_per_1000_tokens == kept * 1000 // 256
    assert told.tokens_per_gib == (1 << 30) * 256 // kept
    assert "--chunk-size 256 --separate-object-groups" in told.lmcache_server
    assert "--block-size 256" in told.vllm_serve


@pytest.mark.parametrize(
    "family, kind, window",
    [
        ("gemma3", "SlidingWindowSpec", 64),
        ("gpt-oss", "SlidingWindowSpec", 128),
        ("olmo3", "SlidingWindowSpec", 256),
        ("llama4", "ChunkedLocalAttentionSpec", 256),
    ],
)
def test_windows(tell, family: str, kind: str, window: int) -> None:
    told = tell(family, attention_backend="FLASH_ATTN", block_size=32)
    local, full = told.groups
    page = 32 * 2 * 2 * 64 * _ITEM
    assert (local.kind, local.layers, local.window) == (kind, [2], window)
    assert (full.kind, full.layers, full.window) == ("FullAttentionSpec", [2], 0)
    assert local.page_size_bytes == full.page_size_bytes == page
    assert told.chunk_size == 256
    blocks = 256 // 32 + min(window, 256) // 32
    assert told.bytes_per_1000_tokens == 2 * blocks * page * 1000 // 256


def test_latent_attention_on_the_blocks_of_its_backend(tell) -> None:
    told = tell("deepseek", attention_backend="FLASHMLA", block_size=256)
    (group,) = told.groups
    assert (group.kind, group.layers) == ("MLAAttentionSpec", [4])
    assert (group.kernel_block_size, group.k) == (64, 4)
    assert group.page_size_bytes == 256 * (512 + 64) * _ITEM
    assert [part.name for part in group.entry] == ["latent"]


def test_heads_and_layers_are_split_over_ranks(tell) -> None:
    whole = tell("plain", attention_backend="FLASH_ATTN")
    halved = tell("plain", attention_backend="FLASH_ATTN", tensor_parallel_size=2)
    split = tell(
        "plain",
        attention_backend="FLASH_ATTN",
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
    )
    (one,), (half,), (quarter,) = whole.groups, halved.groups, split.groups
    assert (one.layers, half.layers, quarter.layers) == ([4], [4], [2, 2])
    assert half.page_size_bytes == quarter.page_size_bytes == one.page_size_bytes // 2
    all_ranks = {told.bytes_per_1000_tokens for told in (whole, halved, split)}
    assert len(all_ranks) == 1, "ranks store what they have, once"
    prints = {told.fingerprint for told in (whole, halved, split)}
    assert len(prints) == 3


def test_latent_attention_is_stored_once_for_all_ranks(tell) -> None:
    options = {"attention_backend": "FLASHMLA"}
    whole = tell("deepseek", **options)
    ranks = tell("deepseek", tensor_parallel_size=4, **options)
    dcp = tell(
        "deepseek", tensor_parallel_size=4, decode_context_parallel_size=2, **options
    )
    assert whole.groups == ranks.groups == dcp.groups
    assert whole.fingerprint == ranks.fingerprint != dcp.fingerprint
    assert len({t.bytes_per_1000_tokens for t in (whole, ranks, dcp)}) == 1


def test_a_smaller_cache_dtype_and_another_layout(tell) -> None:
    options = {"attention_backend": "FLASH_ATTN", "block_size": 16}
    (wide,) = tell("plain", **options).groups
    told = tell("plain", kv_cache_dtype="fp8", kv_cache_layout="BLHNC", **options)
    (narrow,) = told.groups
    assert narrow.page_size_bytes == wide.page_size_bytes // 2
    assert told.kv_cache_layout == "BLHNC"
    assert told.vllm_serve.startswith("VLLM_KV_CACHE_LAYOUT=BLHNC vllm serve ")
    assert "--kv-cache-dtype fp8" in told.vllm_serve


def test_the_fingerprint_follows_what_a_page_holds(tell) -> None:
    options = {"attention_backend": "FLASH_ATTN", "block_size": 256}
    one = tell("plain", **options).fingerprint
    assert tell("plain", **options).fingerprint == one
    assert tell("plain", kernel_block_sizes=(32,), **options).fingerprint != one


def test_the_process_is_left_as_it_was(tell) -> None:
    before = current_platform.__class__
    tell("plain", attention_backend="FLASH_ATTN", tensor_parallel_size=2)
    assert current_platform.__class__ is before
    assert not distributed.is_initialized()


def test_a_block_of_qwen3_next(tmp_path: Path) -> None:
    """As vLLM's log has it: 544 tokens, the fewest of 16 that hold the states."""
    told = MODELS["Qwen3-Next-80B-A3B"].explain(tmp_path)
    states = 3 * (2 * 16 * 128 + 32 * 128) * _ITEM + 32 * 128 * 128 * _ITEM
    token = 2 * 2 * 256 * _ITEM
    assert 528 * token < states <= 544 * token
    assert {group.block_size for group in told.groups} == {544}
    assert [group.layers for group in told.groups] == [[12]] * 4
    assert told.groups[0].padding_bytes == 544 * token - states


def test_the_table_in_the_readme_is_true() -> None:
    text = README.read_text()
    assert releases.with_table(text, MARKERS, table()) == text
