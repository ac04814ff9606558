"""Only chunks whose kept blocks are all real pages reach the server as such."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from lmcache.v1.kv_layer_groups import KVLayerGroupsManager
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import all_null_chunk_masks
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from lmcache_hook import stored
from tests.unit.overlay import pools
from tests.unit.overlay.test_kinds import SERVED, of_release


def window(tokens: int, size: int) -> Any:
    return pools.attention("SlidingWindowSpec", tokens, sliding_window=size)


def local(tokens: int, size: int) -> Any:
    return pools.attention(
        "ChunkedLocalAttentionSpec", tokens, attention_chunk_size=size
    )


def states(tokens: int) -> Any:
    return pools.mamba(tokens, [(8,)], [torch.float32])


def test_s1_states_of_a_chunk_of_two_blocks() -> None:
    """Blocks of 256 in chunks of 512: a state in the first half only is no state."""
    groups = stored.kept([states(256), pools.full(256)], [256, 256], 512)
    ids = [[7, 0, 0, 8], [1, 2, 3, 4]]
    stored.null_unstorable(ids, groups)
    assert ids == [[0, 0, 0, 8], [1, 2, 3, 4]]


def test_s2_a_window_behind_a_local_hit() -> None:
    """Full and window 256, blocks of 16, chunks of 256; 640 of 768 tokens hit."""
    groups = stored.kept([pools.full(16), window(16, 256)], [16, 16], 256)
    ids = [list(range(1, 49)), [0] * 24 + list(range(101, 125))]
    stored.null_unstorable(ids, groups)
    real = [any(ids[1][16 * i : 16 * (i + 1)]) for i in range(3)]
    assert real == [False, False, True]
    assert all(ids[0])


def test_groups_that_share_an_object_share_its_fate() -> None:
    specs = [window(16, 64), window(16, 48), states(64), pools.full(16)]
    groups = stored.kept(specs, [16, 16, 64, 16], 64)
    ids = [[1, 2, 3, 4], [5, 0, 6, 7], [8], [9, 10, 11, 12]]
    stored.null_unstorable(ids, groups)
    assert ids == [[0] * 4, [0] * 4, [8], [9, 10, 11, 12]]


def test_windows_are_whole_blocks() -> None:
    """LMCache refuses others, and a larger one keeps what is needed."""
    specs = [window(128, 64), window(32, 100), local(32, 48), pools.full(32)]
    groups = stored.kept(specs, [128, 32, 32, 32], 256)
    assert [g.window for g in groups] == [128, 128, 64, -1]
    assert [g.last for g in groups] == [1, 4, 2, 8]


def test_scratch_groups_have_no_part() -> None:
    groups = stored.kept([pools.full(16), pools.full(16)], [16, 0], 64)
    ids = [[1, 2, 0, 4], []]
    stored.null_unstorable(ids, groups)
    assert ids == [[0] * 4, []]


@st.composite
def stores(draw: Any) -> Any:
    """Specs, tokens per block, chunk and block ids of a store."""
    specs, blocks = [], []
    for _ in range(draw(st.integers(1, 4))):
        block = draw(st.sampled_from([4, 8, 16]))
        size = draw(st.integers(1, 70))
        kinds = [pools.full(block), window(block, size), local(block, size)]
        specs.append(draw(st.sampled_from([*kinds, states(block)])))
        blocks.append(block)
    chunk = math.lcm(*blocks) * draw(st.integers(1, 3))
    tokens = chunk * draw(st.integers(1, 3))
    ids = [
        draw(st.lists(st.sampled_from([0, 1, 2, 3]), min_size=n, max_size=n))
        for n in (tokens // block for block in blocks)
    ]
    return specs, blocks, chunk, ids


class Server:
    """LMCache's own grouping of kernel groups into objects, and what it skips."""

    def __init__(self, groups: list[stored.Kept], blocks: list[int], chunk: int):
        self.manager: Any = object.__new__(KVLayerGroupsManager)
        self.manager._lmcache_tokens_per_chunk = chunk
        self.manager._separate_object_groups = True
        self.manager._kernel_groups = [
            EngineGroupInfoView(g, blocks[g.group_id]) for g in groups
        ]
        self.groups, self.chunk = groups, chunk
        self.objects = self.manager._detect_object_groups(())

    def commits(self, ids: list[list[int]], chunk: int) -> list[tuple[int, list[int]]]:
        """What the server writes of a chunk: group -> the block ids it keeps."""
        per_chunk = [g.per_chunk for g in self.groups]
        masks = all_null_chunk_masks(ids, self.objects, per_chunk, chunk + 1)
        written = []
        for mask, group in zip(masks, self.objects):
            if not mask[chunk]:
                for i in group.kernel_group_indices:
                    g = self.groups[i]
                    end = (chunk + 1) * g.per_chunk
                    written.append((i, ids[i][end - g.last : end]))
        return written


class EngineGroupInfoView:
    def __init__(self, group: stored.Kept, block: int) -> None:
        info = EngineGroupInfo(group.group_id, (group.group_id,), block)
        self.sw_size_tokens = group.window
        self.recurrent_state = group.bucket[0]
        self.extra_object_group_tag = info.extra_object_group_tag


@given(store=stores())
def test_no_null_block_is_ever_committed(store: Any) -> None:
    """Against LMCache's own grouping and masks, over random stores.

    Every chunk and group is either written as it was, all blocks real, or not at all;
    and what could be written is.
    """
    specs, blocks, chunk, ids = store
    groups = stored.kept(specs, blocks, chunk)
    before = [list(group) for group in ids]
    stored.null_unstorable(ids, groups)
    server = Server(groups, blocks, chunk)
    for i in range(len(ids[0]) * blocks[0] // chunk):
        written = server.commits(ids, i)
        assert all(0 not in kept for _, kept in written)
        could = []
        for members in server.objects:
            parts = [
                (k, before[k][(i + 1) * g.per_chunk - g.last : (i + 1) * g.per_chunk])
                for k in members.kernel_group_indices
                for g in [groups[k]]
            ]
            if all(0 not in part for _, part in parts):
                could += parts
        assert sorted(written) == sorted(could)


def skipped_tokens(spec: Any, computed: int) -> int:
    """What vLLM's manager of such a spec frees."""
    base = managers.SingleTypeKVCacheManager.get_num_skipped_tokens
    manager_class = KVCacheSpecRegistry.get_manager_class(spec)
    if manager_class.get_num_skipped_tokens is base:
        return 0
    pool = BlockPool(64, True, 16)
    arguments = {
        "block_pool": pool,
        "enable_caching": True,
        "kv_cache_group_id": 0,
        "scheduler_block_size": spec.block_size,
    }
    manager = managers.get_manager_for_kv_cache_spec(
        spec, max_in_flight_tokens=64, max_model_len=64, **arguments
    )
    return max(0, manager.get_num_skipped_tokens(computed))


@pytest.mark.parametrize("kind", [*of_release(SERVED), "MambaSpec"])
def test_freed_tokens_are_vllms(kind: str) -> None:
    """For every kind of spec, held against vLLM's own block managers."""
    if kind in ("AttentionSpec", "HiddenStateCacheSpec"):
        pytest.skip("no manager of its own")
    spec: Any = states(16) if kind == "MambaSpec" else SERVED[kind](16)
    for computed in range(0, 200, 7):
        freed = stored.freed_tokens(spec, computed, num_prompt=64)
        if kind == "RSWASpec":
            assert freed == range(64, computed - spec.rswa_window)
            continue
        assert len(freed) == skipped_tokens(spec, computed) and freed.start == 0


class Tracked:
    def __init__(self, ids: list[list[int]]) -> None:
        self.allocated_block_ids = dict(enumerate(ids))
        self.num_prompt_tokens = 10**6
        self.forgotten: dict[int, int] = {}


def test_freed_blocks_are_forgotten() -> None:
    """A chunk that two steps fill: the first step's blocks are another request's."""
    specs = [pools.full(32), local(32, 256), window(32, 64)]
    tracker: Any = Tracked([list(range(1, 17)) for _ in specs])
    stored.forget_freed(tracker, specs, [32] * 3, computed=300)
    ids = tracker.allocated_block_ids
    assert 0 not in ids[0]
    assert ids[1] == [0] * 8 + list(range(9, 17))
    assert ids[2] == [0] * 7 + list(range(8, 17))
    groups = stored.kept(specs, [32] * 3, 512)
    stored.null_unstorable(list(ids.values()), groups)
    assert ids[1] == [0] * 8 + list(range(9, 17)), "the kept half is real"


@given(
    steps=st.lists(st.integers(1, 90), max_size=8),
    size=st.integers(1, 70),
    block=st.sampled_from([4, 16]),
)
def test_forgetting_step_by_step_is_forgetting_at_once(
    steps: list[int], size: int, block: int
) -> None:
    specs = [window(block, size), local(block, size), states(block)]
    one: Any = Tracked([list(range(1, 100)) for _ in specs])
    other: Any = Tracked([list(range(1, 100)) for _ in specs])
    for computed in [sum(steps[: i + 1]) for i in range(len(steps))]:
        stored.forget_freed(one, specs, [block] * 3, computed)
    stored.forget_freed(other, specs, [block] * 3, sum(steps))
    assert one.allocated_block_ids == other.allocated_block_ids


def test_leaf_of_a_uniform_group() -> None:
    leaf = window(16, 32)
    spec = interface.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": leaf})
    assert stored.leaf_spec(interface.KVCacheGroupSpec(["a"], spec)) is leaf
    assert stored.leaf_spec(interface.KVCacheGroupSpec(["a"], leaf)) is leaf
