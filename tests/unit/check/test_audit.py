"""Which blocks are compared, and which bytes of them."""

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_hook import stored
from tests.unit.overlay import pools
from vllm_patches.check import audit

CHUNK = 256
FULL = pools.full(64)
WINDOW = pools.attention("SlidingWindowSpec", 64, sliding_window=128)
WIDE = pools.attention("SlidingWindowSpec", 64, sliding_window=300)
STATES = pools.mamba(64, [(6,), (4, 4)], [torch.bfloat16, torch.float32])


def kept_indices(spec, ids: list[int], skip: int | None) -> list[int]:
    kept = stored.kept([spec], [64], CHUNK)
    found = list(audit.kept_blocks([ids], kept, [64], skip))
    assert all(ids[i] == block_id and not group for group, i, block_id in found)
    return [i for _, i, _ in found]


@pytest.mark.parametrize(
    "spec, stores, loads",
    [
        (FULL, range(12), range(12)),
        (WINDOW, [2, 3, 6, 7, 10, 11], [10, 11]),
        (WIDE, range(12), range(4, 12)),
        (STATES, [3, 7, 11], [11]),
    ],
)
def test_blocks_of_three_chunks(spec, stores, loads) -> None:
    ids = list(range(1, 13))
    assert kept_indices(spec, ids, None) == list(stores)
    assert kept_indices(spec, ids, 0) == list(loads)


def test_null_blocks_and_skipped_tokens_do_not_count() -> None:
    ids = [1, 2, 0, 4, 5, 6, 0, 8]
    assert kept_indices(FULL, ids, None) == [0, 1, 3, 4, 5, 7]
    assert kept_indices(FULL, ids, 128) == [3, 4, 5, 7]


def test_padding_is_no_content() -> None:
    padded = pools.full(64, page_size_padded=4096)
    assert padded.page_size_bytes == 4096
    assert audit.content_bytes(padded) == audit.content_bytes(FULL) == 64 * 2 * 8 * 2
    states = pools.mamba(
        64, [(6,), (4, 4)], [torch.bfloat16, torch.float32], page_size_padded=4096
    )
    assert audit.content_bytes(states) == 6 * 2 + 16 * 4


def test_layers_of_a_uniform_group_have_their_own_spec() -> None:
    wide = pools.full(64, num_kv_heads=4)
    leaves = {"a": FULL, "b": wide}
    uniform = UniformTypeKVCacheSpecs(64, kv_cache_specs=leaves)
    groups = [KVCacheGroupSpec(["a", "b"], uniform), KVCacheGroupSpec(["c"], STATES)]
    config = KVCacheConfig(4, [], groups)
    assert audit.leaf_specs(config) == leaves | {"c": STATES}
