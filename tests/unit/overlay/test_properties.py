"""Random pools: the view of page n is the storage's page n, always."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

from tests.unit.overlay import lmcache, pools

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn]
STATE_DTYPES = [torch.float32, torch.bfloat16, torch.int8]
BLOCK_SIZES = [4, 6, 16, 24]


@st.composite
def attention_specs(draw: Any, block_size: int) -> Any:
    kind = draw(
        st.sampled_from(
            ["FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"]
        )
    )
    extra = {
        "SlidingWindowSpec": {"sliding_window": 2 * block_size},
        "ChunkedLocalAttentionSpec": {"attention_chunk_size": 8},
    }.get(kind, {})
    return pools.attention(
        kind,
        block_size,
        num_kv_heads=draw(st.integers(1, 4)),
        head_size=draw(st.sampled_from([4, 6, 8])),
        dtype=draw(st.sampled_from(DTYPES)),
        **extra,
    )


@st.composite
def mla_specs(draw: Any, block_size: int, ratios: list[int]) -> Any:
    ratio = draw(st.sampled_from([r for r in ratios if block_size % r == 0]))
    dtype = draw(st.sampled_from(DTYPES))
    width = draw(st.sampled_from([4, 8, 12]))
    spec = pools.mla(block_size, width, ratio, dtype=dtype)
    if draw(st.booleans()):
        return spec
    padded = spec.page_size_bytes + dtype.itemsize * draw(st.integers(0, 9))
    return pools.mla(block_size, width, ratio, dtype=dtype, page_size_padded=padded)


@st.composite
def mamba_specs(draw: Any, block_size: int) -> Any:
    """States whose offsets and pages their dtypes divide, as vLLM requires."""
    dtypes = draw(st.lists(st.sampled_from(STATE_DTYPES), min_size=1, max_size=4))
    align = math.lcm(*(dtype.itemsize for dtype in dtypes))
    shapes, size = [], 0
    for i, dtype in enumerate(dtypes):
        shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        if i + 1 < len(dtypes):
            shape[-1] *= align // dtype.itemsize
        shapes.append(tuple(shape))
        size += math.prod(shape) * dtype.itemsize
    padded = -(-size // align) * align + align * draw(st.integers(0, 40))
    return pools.mamba(block_size, shapes, dtypes, page_size_padded=padded)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def bound_pools(draw: Any) -> pools.Pool:
    """Tensors bound as any release binds them, of any memory order."""
    blocks_first = draw(st.booleans())
    layouts = ["NHD", "HND", *(["BLNHC", "BLHNC"] if blocks_first else [])]
    pool = pools.Pool(
        draw(st.integers(1, 7)),
        draw(st.sampled_from(layouts)),
        blocks_first,
        offset=draw(st.sampled_from([0, 64, 1024])),
        tail=draw(st.integers(0, 99)),
        extra_blocks=draw(st.sampled_from([0, 0, 1, 3])),
    )
    if draw(st.integers(0, 3)) == 0:
        # One layer a block: sub-paged layers may be blocks first too.
        _add_group(draw, pool, 1, can_split=True)
        return pool.bind()
    for _ in range(draw(st.integers(1, 3))):
        _add_group(draw, pool, draw(st.integers(1, 3)), can_split=not blocks_first)
    if blocks_first:
        _align_blocks(pool)
    return pool.bind()


def _add_group(draw: Any, pool: pools.Pool, layers: int, can_split: bool) -> None:
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    kind = draw(st.sampled_from(["attention", "mla", "uniform", "mamba"]))
    kernel = draw(st.sampled_from(divisors(block_size))) if can_split else block_size
    token_major = "NH" in pool.kv_layout
    if kind == "mamba":
        spec = draw(mamba_specs(block_size))
        forms = ["row", "content", *([] if pool.blocks_first else ["states"])]
        pool.add(spec, draw(st.sampled_from(forms)), None, layers)
    elif kind == "attention":
        spec = draw(attention_specs(block_size))
        forms = ["rank4", *([] if pool.blocks_first else ["rank5", "kv_first"])]
        pool.add(spec, draw(st.sampled_from(forms)), kernel, layers)
    else:
        form = draw(st.sampled_from(["rank3", "head_last" if token_major else "rank4"]))
        ratios = [1, 2, 4]
        if kernel != block_size:
            ratios = [r for r in ratios if kernel % r == 0]
            ratios = ratios if pools.HAS_TOKENS_PER_STATE else [1]
        specs = [draw(mla_specs(block_size, ratios)) for _ in range(layers)]
        specs = [_aligned(spec) for spec in specs]
        if kernel != block_size:
            specs = [pools.mla(block_size, dtype=spec.dtype) for spec in specs]
        if kind == "mla":
            pool.add(specs[0], form, kernel, layers)
        else:
            pool.add(specs, form, kernel)


def _align_blocks(pool: pools.Pool) -> None:
    """Give every layer of a packed pool a page that all dtypes divide."""
    groups, sizes, layers = pool.groups, pool.kernel_block_sizes, pool.layers
    pool.groups, pool.kernel_block_sizes, pool.layers = [], [], {}
    for group, kernel_block_size in zip(groups, sizes):
        members = [layers[name] for name in group.layer_names]
        specs = [_aligned(layer.spec) for layer in members]
        forms = [layer.form for layer in members]
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            pool.add(specs, forms, kernel_block_size)
        else:
            pool.add(specs[0], forms[0], kernel_block_size, len(specs))


def _aligned(spec: Any) -> Any:
    page = -(-spec.page_size_bytes // 4) * 4
    values = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    return type(spec)(**(values | {"page_size_padded": page}))


def can_judge(pool: pools.Pool) -> bool:
    """LMCache takes two blocks for K and V, one for none, and every block bound."""
    return pool.num_blocks > 2 and not pool.extra_blocks


@settings(max_examples=8 * settings().max_examples)
@given(pool=bound_pools())
def test_bound_tensors(pool: pools.Pool, tally: Any) -> None:
    caches = pool.build()
    pools.check(pool, caches)
    tally.example()
    if can_judge(pool):
        lmcache.judge(pool, caches)
        tally.add(lmcache.second_opinion(pool))


@st.composite
def allocated_pools(draw: Any) -> pools.Pool:
    """Pools that vLLM's own code configures, allocates and views (0.29 on)."""
    layout = draw(st.sampled_from(["LBNHC", "LBHNC", "BLNHC", "BLHNC"]))
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    groups, sizes = [], []
    layers = draw(st.integers(1, 3))
    spec = draw(st.one_of(attention_specs(block_size), mla_specs(block_size, [1, 2])))
    is_padded = spec.page_size_padded is not None
    dense = not is_padded and (layout.startswith("LB") or layers == 1)
    ratio = int(spec.tokens_per_state)
    kernels = [d for d in divisors(block_size) if d % ratio == 0]
    kernel = draw(st.sampled_from(kernels)) if dense else block_size
    names = [f"attn.{i}" for i in range(layers)]
    groups.append(KVCacheGroupSpec(names, spec))
    sizes.append(kernel)
    if draw(st.booleans()):
        # A Mamba group over the same bytes: pages are unified by padding.
        states = draw(mamba_specs(draw(st.sampled_from(BLOCK_SIZES))))
        content = pools.content_size(states)
        if content <= spec.page_size_bytes:
            states = pools.mamba(
                states.block_size,
                states.shapes,
                states.dtypes,
                page_size_padded=spec.page_size_bytes,
            )
            names = [f"mamba.{i}" for i in range(draw(st.integers(1, 3)))]
            kernels = [states.block_size]
            if layout.startswith("LB") or kernel == block_size:
                groups.append(KVCacheGroupSpec(names, states))
                sizes += kernels
    if draw(st.booleans()) and layout.startswith("B") and kernel == block_size:
        leaves = {
            f"leaf.{i}": draw(mla_specs(block_size, [1, 2]))
            for i in range(draw(st.integers(1, 3)))
        }
        leaves = {name: _aligned(leaf) for name, leaf in leaves.items()}
        uniform = UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=leaves)
        groups.append(KVCacheGroupSpec(list(leaves), uniform))
        sizes.append(block_size)
        groups = [
            group
            if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
            else KVCacheGroupSpec(group.layer_names, _aligned(group.kv_cache_spec))
            for group in groups
        ]
    return pools.allocate(draw(st.integers(1, 6)), layout, groups, sizes)


@pytest.mark.skipif(not pools.HAS_ALLOCATION, reason="the release has no such code")
@settings(max_examples=5 * settings().max_examples)
@given(data=st.data())
def test_tensors_that_vllm_allocates(data: st.DataObject, tally: Any) -> None:
    pool = data.draw(allocated_pools())
    caches = pool.build()
    pools.check(pool, caches)
    tally.example()
    if can_judge(pool):
        lmcache.judge(pool, caches)
        tally.add(lmcache.second_opinion(pool))
