"""What cannot be served is refused: one error, every layer, numbers and remedy."""

import weakref

import pytest
import torch
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.worker.logical_blocks import LogicalKVCaches, build_logical_kv_caches

from tests.unit.overlay import pools

BF16, FP32 = torch.bfloat16, torch.float32


def refusal(pool: pools.Pool) -> str:
    with pytest.raises(ValueError) as error:
        pool.build()
    return str(error.value)


def test_every_offending_layer_is_listed() -> None:
    pool = pools.Pool(4)
    pool.add(pools.full(32), layers=2)
    pool.add(pools.attention("CrossAttentionSpec", 16), layers=2)
    states = pools.mamba(32, [(8,)], [BF16], mamba_cache_mode="none")
    pool.add(states, "row")
    pool.add(pools.full(32), "rank4", 16)
    pool.bind()
    pool.kernel_block_sizes[3] = 12
    message = refusal(pool)
    assert len(message.splitlines()) == 1 + 4
    for line in (
        "group 1, layer 'layers.2' (CrossAttentionSpec): cross attention",
        "group 1, layer 'layers.3' (CrossAttentionSpec): cross attention",
        "group 2, layer 'layers.4' (MambaSpec): mamba_cache_mode 'none'",
        "group 3, layer 'layers.5' (FullAttentionSpec): kernel block size 12 does not",
    ):
        assert line in message
    assert "--mamba-cache-mode align" in message
    assert "--block-size" in message
    assert "without this KV connector" in message


def test_nothing_is_computed_before_it_is_asked_for() -> None:
    """Whoever asks gets the view or the error; everyone else is left alone."""
    pool = pools.Pool(4).add(pools.full(32)).add(pools.full(32)).bind()
    pool.kernel_block_sizes[1] = 0
    caches = LogicalKVCaches(pool.config, pool.kv_caches, pool.kernel_block_sizes)
    assert caches.raw is pool.kv_caches
    assert list(caches) == ["layers.0", "layers.1"] and len(caches) == 2
    for ask in (
        lambda: caches["layers.0"],
        lambda: caches.blocks,
        lambda: caches.document,
        lambda: caches.fingerprint,
    ):
        with pytest.raises(ValueError, match="group 1, layer 'layers.1'"):
            ask()


def test_nothing_is_kept_alive() -> None:
    pool = pools.Pool(4).add(pools.full(32)).bind()
    caches = LogicalKVCaches(pool.config, pool.kv_caches, pool.kernel_block_sizes)
    bound = weakref.ref(pool.kv_caches["layers.0"])
    pool.kv_caches.clear()
    assert bound() is None and len(caches) == 0


def test_a_layer_that_the_config_does_not_place() -> None:
    pool = pools.Pool(4).add(pools.full(32)).bind()
    pool.tensors.clear()
    assert "the KV cache config places no tensor for it" in refusal(pool)


@pytest.mark.parametrize("mode", ["align", "all"])
def test_reusable_snapshots_are_served(mode: str) -> None:
    spec = pools.mamba(32, [(8,)], [BF16], mamba_cache_mode=mode)
    pools.Pool(4).add(spec, "row").bind().build()


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layouts_that_split_a_page(layout: str) -> None:
    pool = pools.Pool(4).add(pools.full(32)).bind()
    pool.kv_layout = layout
    assert f"layout {layout} splits its page by head" in refusal(pool)


@pytest.mark.parametrize("size", [0, -8, 5, 64])
def test_kernel_block_sizes_that_do_not_divide(size: int) -> None:
    pool = pools.Pool(4).add(pools.full(32)).bind()
    pool.kernel_block_sizes = [size]
    assert f"kernel block size {size} does not divide block size 32" in refusal(pool)


def test_a_group_without_a_kernel_block_size() -> None:
    pool = pools.Pool(4).add(pools.full(32)).bind()
    pool.kernel_block_sizes = []
    assert "no kernel block size" in refusal(pool)


@pytest.mark.parametrize("size", [8, 16])
def test_a_wrong_kernel_block_size(size: int) -> None:
    pool = pools.Pool(4).add(pools.full(32), "rank4", 8).bind()
    pool.kernel_block_sizes = [size + 8]
    assert refusal(pool)
    pool = pools.Pool(4).add(pools.full(32)).bind()
    pool.kernel_block_sizes = [size]
    assert refusal(pool)


def test_a_layer_without_a_cache() -> None:
    pool = pools.Pool(4).add(pools.full(32), layers=2).bind()
    del pool.kv_caches["layers.1"]
    assert "layer 'layers.1' (FullAttentionSpec): no KV cache was bound" in refusal(
        pool
    )


def test_a_layer_without_a_spec() -> None:
    pool = pools.Pool(4).add([pools.full(32), pools.full(32)]).bind()
    spec = pool.groups[0].kv_cache_spec
    assert isinstance(spec, UniformTypeKVCacheSpecs)
    del spec.kv_cache_specs["layers.1"]
    assert "a layer with no spec is unknown" in refusal(pool)


def test_page_bytes_that_disagree() -> None:
    for heads in (1, 3):
        pool = pools.Pool(4).add(pools.full(32)).bind()
        pool.groups[0].kv_cache_spec = pools.full(32, num_kv_heads=heads)
        page = 512 * heads
        assert f"holds 1024 bytes per block, its spec's page {page}" in refusal(pool)


def test_padding_hides_no_missing_byte() -> None:
    pool = pools.Pool(4).add(pools.full(32, page_size_padded=2048)).bind()
    raw = pool.kv_caches["layers.0"]
    pool.kv_caches["layers.0"] = raw[:, :1]
    assert "holds 1008 bytes per block, its spec's page 2048" in refusal(pool)


def test_padding_hides_no_siblings_heads() -> None:
    """``[B, H, L, N, C]``: the other layer's head lies between two of this one."""
    pool = pools.Pool(4).add(pools.full(32, page_size_padded=2048)).bind()
    raw = pool.kv_caches["layers.0"]
    split = raw.as_strided(raw.shape, (1024, 512, 8, 1))
    pool.kv_caches["layers.0"] = split
    assert "holds 1536 bytes per block, its spec's page 2048" in refusal(pool)


def test_states_larger_than_what_is_bound() -> None:
    pool = pools.Pool(4).add(pools.mamba(32, [(64,)], [BF16]), "row").bind()
    pool.kv_caches["layers.0"] = pool.kv_caches["layers.0"][..., :100]
    assert "holds 100 bytes per block, its spec's states 128" in refusal(pool)


@pytest.mark.parametrize("states", [slice(0), slice(1), slice(None, None, -1)])
def test_states_that_are_not_the_specs(states: slice) -> None:
    spec = pools.mamba(32, [(8,), (8,)], [BF16, FP32])
    pool = pools.Pool(4).add(spec, "states").bind()
    pool.kv_caches["layers.0"] = pool.kv_caches["layers.0"][states]
    assert "its spec puts them at [0, 16], 48 apart" in refusal(pool)


def test_states_of_different_storages() -> None:
    spec = pools.mamba(32, [(8,), (8,)], [BF16, FP32])
    pool = pools.Pool(4).add(spec, "states").bind()
    conv, ssm = pool.kv_caches["layers.0"]
    apart = torch.zeros(64, dtype=FP32).as_strided(ssm.shape, ssm.stride(), 4)
    pool.kv_caches["layers.0"] = [conv, apart]
    assert "Bind the states in the order" in refusal(pool)


@pytest.mark.parametrize("form", ["rank4", "row", "states"])
def test_tensors_without_a_storage(form: str) -> None:
    spec = pools.full(32)
    if form in pools.MAMBA_FORMS:
        spec = pools.mamba(32, [(8,)], [BF16])
    pool = pools.Pool(4).add(spec, form).bind()
    raw = pool.kv_caches["layers.0"]
    meta = [t.to("meta") for t in raw] if isinstance(raw, list) else raw.to("meta")
    pool.kv_caches["layers.0"] = meta
    assert "(meta) has no storage to view" in refusal(pool)


def test_an_attention_cache_that_is_no_tensor() -> None:
    pool = pools.Pool(4).add(pools.full(32)).bind()
    pool.kv_caches["layers.0"] = (pool.kv_caches["layers.0"],) * 2
    assert "(tuple) has no storage to view" in refusal(pool)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2, 32, 8)])
def test_tensors_of_too_few_blocks(shape: tuple[int, ...]) -> None:
    pool = pools.Pool(4).add(pools.full(32)).bind()
    pool.kv_caches["layers.0"] = torch.zeros(shape, dtype=BF16)
    assert "is not that of 4 kernel pages" in refusal(pool)


def test_a_tensor_beside_its_placement() -> None:
    pool = pools.Pool(4, blocks_first=True).add(pools.full(32), layers=2).bind()
    caches = pool.kv_caches
    caches["layers.0"], caches["layers.1"] = caches["layers.1"], caches["layers.0"]
    message = refusal(pool)
    assert "start at byte 1024 and lie 2048 apart" in message
    assert "puts them at byte 0, 2048 apart" in message


def test_a_stride_beside_its_placement() -> None:
    pool = pools.Pool(4).add(pools.full(32)).bind()
    wide = pools.Pool(4, blocks_first=True).add(pools.full(32), layers=2).bind()
    pool.kv_caches = {"layers.0": wide.kv_caches["layers.0"]}
    assert "lie 2048 apart" in refusal(pool)


def test_pages_that_overlap() -> None:
    pool = pools.Pool(4).add(pools.full(32)).bind()
    raw = pool.kv_caches["layers.0"]
    pool.kv_caches["layers.0"] = raw.as_strided(raw.shape, (508, *raw.stride()[1:]))
    assert "lie 1016 apart" in refusal(pool)
    for tensor in pool.tensors:
        tensor.block_stride, tensor.offset = 1016, 0
    assert "4 pages of 1024 bytes, 1016 apart from byte 0 on, overlap" in refusal(pool)


def test_pages_past_the_storages_end() -> None:
    pool = pools.Pool(4).add(pools.full(32, page_size_padded=1500)).bind()
    raw = pool.kv_caches["layers.0"]
    cut = torch.zeros(3 * 1500 + 1024, dtype=torch.uint8)  # the last page's padding
    pool.kv_caches["layers.0"] = pools.strided(
        cut, raw.dtype, 0, raw.shape, [s * raw.element_size() for s in raw.stride()]
    )
    assert "pass the end of its 5524-byte storage" in refusal(pool)


def test_the_block_size_is_the_groups_own() -> None:
    """Two groups, two block sizes: nothing reads a common one."""
    pool = pools.Pool(4)
    pool.add(pools.full(64), "rank4", 16).add(pools.full(32), "rank4", 16).bind()
    caches = build_logical_kv_caches(
        pool.config, pool.kv_caches, pool.kernel_block_sizes
    )
    assert [b.block_size for b in caches.blocks.values()] == [64, 32]
    assert [b.blocks_per_kv_block for b in caches.blocks.values()] == [4, 2]
    assert [len(view) for view in caches.values()] == [4, 4]
