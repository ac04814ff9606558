"""Memory orders, states, placements and sharing, one by one."""

import itertools
import logging
from fractions import Fraction
from typing import Any

import pytest
import torch
from vllm.v1.worker import logical_blocks

from tests.unit.overlay import lmcache, pools

BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8


def serve(pool: pools.Pool, tally: Any) -> Any:
    """Build, check and judge; returns the caches."""
    caches = pool.build()
    pools.check(pool, caches)
    tally.geometry()
    lmcache.judge(pool, caches)
    tally.add(lmcache.second_opinion(pool))
    return caches


@pytest.mark.parametrize("kernel_block_size", [4, 16, 32])
@pytest.mark.parametrize("layout", ["NHD", "HND", "LBNHC", "LBHNC"])
@pytest.mark.parametrize("form", ["rank4", "rank5", "kv_first"])
def test_attention(form: str, layout: str, kernel_block_size: int, tally: Any) -> None:
    pool = pools.Pool(5, layout, offset=64, tail=77)
    pool.add(pools.full(32), form, kernel_block_size, layers=2).bind()
    serve(pool, tally)


@pytest.mark.parametrize("layout", ["NHD", "HND", "BLNHC", "BLHNC"])
@pytest.mark.parametrize("heads", [1, 4])
def test_blocks_first(heads: int, layout: str, tally: Any) -> None:
    pool = pools.Pool(4, layout, blocks_first=True, offset=128, tail=9)
    pool.add(pools.full(32, num_kv_heads=heads), layers=3)
    states = pools.mamba(32, [(6,), (4, 4)], [BF16, FP32])
    pool.add(states, "row", layers=2).bind()
    caches = serve(pool, tally)
    assert caches.blocks["layers.3"].block_stride_bytes > states.page_size_bytes


STATES = {
    "Qwen3.5": (2048, [(3, 6144), (16, 128, 128)], [BF16, FP32]),
    "Qwen3-Next": (2048, [(3, 8192), (32, 128, 128)], [BF16, FP32]),
    "Nemotron-H": (4096, [(3, 10240), (128, 64, 128)], [BF16, FP32]),
    "Kimi-Linear": (1152, 3 * [(3, 4096)] + [(32, 128, 128)], 3 * [BF16] + [FP32]),
}
"""Bytes of a token's keys and values in an attention layer; a Mamba layer's states."""


@pytest.mark.parametrize("times", [1, 2], ids=["block", "twice the block"])
@pytest.mark.parametrize("model", STATES)
def test_padding_stays_behind(model: str, times: int, tally: Any) -> None:
    """Pages that vLLM pads to those of attention: what is moved is the states."""
    token, shapes, dtypes = STATES[model]
    content = pools.content_size(pools.mamba(16, shapes, dtypes))
    block_size = times * 16 * -(-content // (16 * token))
    page = block_size * token
    spec = pools.mamba(block_size, shapes, dtypes, page_size_padded=page)
    pool = pools.Pool(2, "LBNHC").add(spec, "content").bind()
    (view,) = serve(pool, tally).values()
    assert view[0].numel() * view.element_size() <= 1.01 * content


def test_a_sub_paged_layer_that_shares_its_blocks_is_refused() -> None:
    pool = pools.Pool(4, "NHD", blocks_first=True)
    pool.add(pools.full(32), "rank4", 8, layers=2).bind()
    with pytest.raises(ValueError, match="256 bytes each and 512 apart"):
        pool.build()


def test_one_sub_paged_layer_may_be_blocks_first(tally: Any) -> None:
    pool = pools.Pool(4, "BLNHC", blocks_first=True)
    serve(pool.add(pools.full(32), "rank4", 8).bind(), tally)


@pytest.mark.parametrize("kernel_block_size", [8, 32])
@pytest.mark.parametrize(
    ("form", "layout"),
    [("rank3", "NHD"), ("rank3", "HND"), ("rank4", "HND"), ("head_last", "NHD")],
)
def test_mla(layout: str, kernel_block_size: int, form: str, tally: Any) -> None:
    pool = pools.Pool(4, layout)
    caches = serve(pool.add(pools.mla(32), form, kernel_block_size).bind(), tally)
    assert caches["layers.0"].ndim == pool.kv_caches["layers.0"].ndim


@pytest.mark.parametrize("form", pools.MAMBA_FORMS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_states_of_any_number_and_dtype_order(
    count: int, form: str, tally: Any
) -> None:
    shapes = [(2, 8), (4, 4), (16,), (8, 1, 2)]
    for dtypes in itertools.product([BF16, FP32], repeat=count):
        for page_size in (None, 512):
            spec = pools.mamba(32, shapes[:count], dtypes, page_size_padded=page_size)
            caches = serve(pools.Pool(3).add(spec, form, layers=2).bind(), tally)
            expected = dtypes[0] if form == "states" else INT8
            assert caches["layers.0"].dtype == expected


def test_pages_that_do_not_divide(tally: Any) -> None:
    shown = {}
    for row in (4096, 4098, 31 * 6, 1009, 1):
        pool = pools.Pool(3, "HND").add(pools.mamba(32, [(row,)], [INT8]), "row")
        caches = serve(pool.bind(), tally)
        shown[row] = caches.blocks["layers.0"].slots_per_block
    assert shown == {4096: 32, 4098: 1, 186: 1, 1009: 1, 1: 1}


def test_a_page_no_whole_number_of_elements() -> None:
    spec = pools.mamba(32, [(5,)], [FP32], page_size_padded=1002)
    sibling = pools.mamba(32, [(1002,)], [INT8])
    pool = pools.Pool(3, blocks_first=True)
    pool.add([spec, sibling], ["states", "row"]).bind()
    caches = pool.build()
    pools.check(pool, caches)
    assert caches["layers.0"].dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, INT8, FP32])
def test_dtypes(dtype: torch.dtype, tally: Any) -> None:
    for kernel_block_size in (8, 32):
        pool = pools.Pool(4).add(
            pools.full(32, dtype=dtype), "rank4", kernel_block_size
        )
        caches = serve(pool.bind(), tally)
        assert caches["layers.0"].dtype == dtype


def test_padded_attention_pages(tally: Any) -> None:
    for form, layout in itertools.product(["rank4", "rank3"], ["NHD", "HND"]):
        spec = pools.mla(32, page_size_padded=1000)
        serve(pools.Pool(4, layout).add(spec, form, layers=2).bind(), tally)


def test_aligned_mla_pages(tally: Any) -> None:
    spec = pools.mla(32, width=10, alignment=576)
    assert (pools.content_size(spec), spec.page_size_bytes) == (640, 1152)
    serve(pools.Pool(4).add(spec, "rank3", layers=2).bind(), tally)


@pytest.mark.parametrize("ratio", [1, 2, 4, 32])
def test_declared_compression(ratio: int, tally: Any) -> None:
    pool = pools.Pool(4, "NHD", blocks_first=True)
    pool.add([pools.mla(32, 8, ratio), pools.mla(32, 16)], "head_last").bind()
    caches = serve(pool, tally)
    assert caches.blocks["layers.0"].slots_per_block == 32 // ratio


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_declared_compression_sub_paged(ratio: int, tally: Any) -> None:
    if not pools.HAS_TOKENS_PER_STATE:
        pytest.skip("this release never splits a compressed page")
    pool = pools.Pool(4, "HND")
    pool.add([pools.mla(32, 8, ratio), pools.mla(32, 16)], "rank4", 8).bind()
    caches = serve(pool, tally)
    assert caches.blocks["layers.0"].slots_per_block == 32 // ratio
    assert caches["layers.0"].shape == (4, 1, 32 // ratio, 8)


@pytest.mark.parametrize("ratio", [Fraction(1, 4), Fraction(2, 3), 3])
def test_slots_that_do_not_divide_the_block(ratio: Any, tally: Any) -> None:
    if not pools.HAS_TOKENS_PER_STATE:
        pytest.skip("this release declares no such slots")
    spec = pools.full(32, tokens_per_state=ratio)
    caches = serve(pools.Pool(4).add(spec).bind(), tally)
    assert caches["layers.0"] is not caches.raw["layers.0"]


def test_a_layers_own_kernel_block_size() -> None:
    spec = pools.mla(32)
    if not hasattr(spec, "storage_block_size") or not pools.HAS_TOKENS_PER_STATE:
        pytest.skip("this release has no such field")
    own = pools.mla(32, storage_block_size=8)
    pool = pools.Pool(4).add([own, own], "rank3", 8).bind()
    pool.kernel_block_sizes = [32]
    pools.check(pool, pool.build())
    whole = pools.mla(32, storage_block_size=32)
    pool = pools.Pool(4).add(whole, "rank3").bind()
    pool.kernel_block_sizes = [8]
    pools.check(pool, pool.build())


def test_more_blocks_than_the_config_says(tally: Any) -> None:
    for form, kernel_block_size in (("rank4", 8), ("rank5", 32), ("rank3", 32)):
        spec = pools.mla(32) if form == "rank3" else pools.full(32)
        pool = pools.Pool(3, extra_blocks=2).add(spec, form, kernel_block_size)
        pools.check(pool.bind(), pool.build())


@pytest.mark.parametrize("form", ["rank4", "rank5", "row", "states"])
@pytest.mark.parametrize("extra_blocks", [0, 3])
def test_a_single_block(extra_blocks: int, form: str) -> None:
    pool = pools.Pool(1, offset=32, extra_blocks=extra_blocks)
    spec: Any = pools.full(32)
    if form in pools.MAMBA_FORMS:
        spec = pools.mamba(32, [(8,), (8,)], [BF16, FP32], page_size_padded=512)
    for kernel_block_size in (8, 32):
        pool.add(spec, form, kernel_block_size)
    pools.check(pool.bind(), pool.build())


@pytest.mark.parametrize("form", ["rank5", "kv_first"])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_two_blocks_or_two_planes(num_blocks: int, form: str, tally: Any) -> None:
    """``[2, 2, ...]`` may be two blocks, or K and V of two blocks: the backend says."""
    pool = pools.Pool(num_blocks).add(pools.full(32), form).bind()
    pools.check(pool, pool.build())
    if form == "kv_first" and num_blocks > 1:
        with pytest.raises(ValueError, match="kernel pages"):
            pool.build(attn_groups=[])


def test_planes_before_blocks_are_refused() -> None:
    pool = pools.Pool(5).add(pools.full(32), "kv_first").bind()
    raw = pool.kv_caches["layers.0"]
    pools.check(pool, pool.build())
    pool.kv_caches["layers.0"] = torch.zeros(raw.shape, dtype=raw.dtype)
    with pytest.raises(ValueError, match="keep a block's heads, K and V together"):
        pool.build()


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_heads_before_blocks_are_refused(heads: int) -> None:
    """Even where as many heads as blocks make every number agree."""
    pool = pools.Pool(4).add(pools.full(32, num_kv_heads=heads)).bind()
    raw = pool.kv_caches["layers.0"]
    split = torch.zeros(heads, 4, 32, 8, dtype=raw.dtype).transpose(0, 1)
    assert split.shape == raw.shape
    pool.kv_caches["layers.0"] = split
    with pytest.raises(ValueError, match="no single byte range"):
        pool.build()


def test_shared_layers_follow_their_target() -> None:
    leaves = [pools.mla(32), pools.mla(32, 16)]
    pool = pools.Pool(4).add(leaves, "rank3", 8).bind()
    pool.kv_caches["grouped"] = pool.kv_caches["layers.1"]
    pool.groups[0].layer_names.append("grouped")  # the worker adds no leaf spec
    pool.kv_caches["ungrouped"] = pool.kv_caches["layers.0"]
    pool.kv_caches["stranger"] = torch.zeros(3)
    caches = pool.build()
    assert caches["grouped"] is caches["layers.1"]
    assert caches["ungrouped"] is caches["layers.0"]
    assert caches.blocks["ungrouped"] is caches.blocks["layers.0"]
    assert caches["stranger"] is pool.kv_caches["stranger"]
    assert "stranger" not in caches.blocks
    assert caches.document["layers"] == [[0, 0], [0, 1], [0, 1]]


def test_a_tensor_bound_under_two_specs_is_viewed_for_each() -> None:
    pool = pools.Pool(4).add(pools.full(32), "rank4", 8).bind()
    other = pools.Pool(8).add(pools.full(16), "rank4", 8).bind()
    pool.kv_caches["other"] = pool.kv_caches["layers.0"]
    other.groups[0].layer_names = ["other"]
    pool.groups += other.groups
    pool.kernel_block_sizes += [8]
    (tensor,) = other.tensors
    setattr(tensor, "layers" if pools.HAS_PLACEMENTS else "shared_by", ["other"])
    pool.tensors.append(tensor)
    caches = pool.build()
    assert caches.blocks["layers.0"].page_size_bytes == 1024
    assert caches.blocks["other"].page_size_bytes == 512


def test_the_storage_may_move() -> None:
    pool = pools.Pool(4).add(pools.full(32), "rank4", 8).bind()
    blocks = pool.build().blocks["layers.0"]
    raw = pool.kv_caches["layers.0"]
    moved = torch.ones(pool.storage.numel(), dtype=torch.uint8)
    raw.set_(moved.untyped_storage(), 0, raw.shape, raw.stride())
    assert blocks.pages.data_ptr() == moved.data_ptr()


def test_an_empty_config() -> None:
    pool = pools.Pool(1)
    assert dict(pool.build()) == {}
    caches = pools.Pool(0).add(pools.full(32), "rank4", 8).bind().build()
    assert len(caches["layers.0"]) == len(caches.blocks["layers.0"].pages) == 0


def test_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(logical_blocks.__name__)
    logger.addHandler(caplog.handler)
    pool = pools.Pool(4).add(pools.full(32), "rank4", 8).add(pools.full(32)).bind()
    with caplog.at_level(logging.INFO, logger.name):
        pool.build()
    logger.removeHandler(caplog.handler)
    assert "2 layers" in caplog.messages[-1] and "1 re-paged" in caplog.messages[-1]
    assert f"version {logical_blocks.CONTRACT_VERSION}" in caplog.messages[-1]


def test_attention_backend_names() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.worker.utils import AttentionGroup

    pool = pools.Pool(4, "HND").add(pools.full(64)).bind()
    names = []
    for kernel_block_size in (None, 32):
        kwargs: dict[str, Any] = {"backend": CPUAttentionBackend}
        kwargs["layer_names"] = ["layers.0"]
        group = AttentionGroup(
            **kwargs, kv_cache_spec=pools.full(64), kv_cache_group_id=0
        )
        if kernel_block_size and not hasattr(group, "kernel_block_size"):
            break  # no backend of this release splits a packed cache
        if kernel_block_size:
            group.kernel_block_size = kernel_block_size
        (page_format,) = pool.build(attn_groups=[[group]]).document["formats"]
        names.append(page_format["backend"])
    assert names == ["CPU_ATTN", "CPU_ATTN@32"][: len(names)]


def test_an_attention_group_without_a_block_table() -> None:
    """Encoder-only layers at the end: no kernel block size, nothing transferred."""
    pool = pools.Pool(4).add(pools.full(32)).bind()
    (group,) = pool.attn_groups("FLASH_ATTN")
    group.kv_cache_group_id = 1
    assert pool.build(attn_groups=[[group]])["layers.0"] is pool.kv_caches["layers.0"]
