"""The release's block tables and the logical view address the same bytes."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.logical_blocks import LogicalKVCaches

from tests.series.worker import pool


@pytest.fixture(params=[256, 128, 32])
def bound(request: pytest.FixtureRequest) -> pool.Pool:
    return pool.make(request.param)


@pytest.fixture
def caches(bound: pool.Pool) -> LogicalKVCaches:
    return bound.block_table.logical_kv_caches(
        bound.config,
        bound.kv_caches,
        "LBHNC" if pool.HAS_ALLOCATION else "HND",
        attn_groups=bound.attn_groups,
    )


def test_block_table_has_both_sizes(bound: pool.Pool) -> None:
    for table, kernel_block_size in zip(
        bound.block_table.block_tables, bound.kernel_block_sizes, strict=True
    ):
        assert table.logical_block_size == pool.BLOCK_SIZE
        assert table.kernel_block_size == kernel_block_size


def test_kernel_pages_are_the_page(bound: pool.Pool, caches: LogicalKVCaches) -> None:
    """What the kernels read and write for a block id is its page, in order."""
    (layer,) = bound.config.kv_cache_groups[pool.ATTENTION].layer_names
    kv_cache, pages = bound.kv_caches[layer], caches.blocks[layer].pages
    k = pool.BLOCK_SIZE // bound.kernel_block_sizes[pool.ATTENTION]
    storage = torch.empty(0, dtype=torch.uint8).set_(kv_cache.untyped_storage())
    storage.random_(256)
    block_ids = random.Random(k).sample(range(pool.NUM_BLOCKS), 7)
    kernel_blocks = bound.kernel_table(block_ids)
    assert len(kernel_blocks) == len(block_ids) * k
    assert kv_cache.shape[0] == pool.NUM_BLOCKS * k
    for i, block_id in enumerate(block_ids):
        rows = kernel_blocks[i * k : (i + 1) * k]
        read = torch.cat([kv_cache[n].view(torch.uint8).flatten() for n in rows])
        assert torch.equal(read, pages[block_id])
    assert len(set(kernel_blocks)) == len(kernel_blocks)
    pages[block_ids[0]] = 7
    assert torch.all(kv_cache[kernel_blocks[:k]].view(torch.uint8) == 7)


def test_states_lie_in_their_page(bound: pool.Pool, caches: LogicalKVCaches) -> None:
    """A Mamba layer's states of a block id are its page, from the base on."""
    for group in bound.config.kv_cache_groups[: pool.ATTENTION]:
        (layer,) = group.layer_names
        states, pages = bound.kv_caches[layer], caches.blocks[layer].pages
        if isinstance(states, torch.Tensor):
            states = [states]
        states[0].untyped_storage().fill_(0)
        for block_id in (0, 5, pool.NUM_BLOCKS - 1):
            for value, state in enumerate(states, start=1):
                state[block_id].view(torch.uint8).fill_(value)
            expected = torch.zeros(pages.shape[1], dtype=torch.uint8)
            end = 0
            for value, state in enumerate(states, start=1):
                size = pool.num_bytes(state[block_id])
                expected[end : end + size] = value
                end += size
            assert torch.equal(pages[block_id], expected)


def test_views_are_pages(bound: pool.Pool, caches: LogicalKVCaches) -> None:
    """One row of what a connector registers is one page up to its padding."""
    for layer, view in caches.items():
        blocks = caches.blocks[layer]
        assert view.shape[0] == blocks.num_blocks == pool.NUM_BLOCKS
        assert view.data_ptr() == blocks.pages.data_ptr()
        shown = view[3].view(torch.uint8).flatten()
        assert torch.equal(shown, blocks.pages[3][: len(shown)])


def test_both_runners_have_one_fingerprint(
    bound: pool.Pool, caches: LogicalKVCaches
) -> None:
    """It goes beside the release's tree: test_trees.py compares the releases."""
    tables: Any = object.__new__(BlockTables)  # V2's; its own memory wants a GPU
    tables.kernel_block_sizes = bound.kernel_block_sizes
    other = tables.logical_kv_caches(
        bound.config,
        bound.kv_caches,
        "LBHNC" if pool.HAS_ALLOCATION else "HND",
        attn_groups=bound.attn_groups,
    )
    assert other.fingerprint == caches.fingerprint
    if tree := os.environ.get("SERIES_TREE"):
        name = f"fingerprint-{bound.kernel_block_sizes[pool.ATTENTION]}"
        Path(tree).with_name(name).write_text(caches.fingerprint)
