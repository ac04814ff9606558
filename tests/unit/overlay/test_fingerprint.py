"""The fingerprint names the byte order inside pages: all of it, and nothing else."""

import itertools
import json
import math
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from vllm.v1.worker import logical_blocks

from tests.unit.overlay import pools

BASE: dict[str, Any] = {
    "kind": "FullAttentionSpec",
    "block_size": 64,
    "kernel_block_size": 16,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": torch.int8,
    "form": "rank4",
    "layout": "NHD",
    "backend": "FLASH_ATTN",
    "kv_quant_mode": 0,
    "mamba_kind": "row",
    "mamba_block_size": 64,
    "mamba_page": 4096,
    "shapes": ((3, 8), (4, 4)),
    "dtypes": (torch.bfloat16, torch.float32),
    "mamba_first": False,
    "layers": 1,
    "mamba_layers": 2,
    # What engines that share may differ in:
    "num_blocks": 5,
    "extra_blocks": 0,
    "offset": 0,
    "tail": 0,
    "prefix": "model.layers",
    "scratch": False,
}

MATTERS: dict[str, list[Any]] = {
    "kind": ["RSWASpec", "SinkFullAttentionSpec", "SlidingWindowSpec"],
    "block_size": [32, 128],
    "kernel_block_size": [8, 32, 64],
    "num_kv_heads": [1, 4],
    "head_size": [4, 16],
    "dtype": [torch.uint8, torch.bfloat16],
    "form": ["rank5"],
    "layout": ["HND"],
    "backend": ["FLASHINFER", "FLASH_ATTN@16", ""],
    "kv_quant_mode": [1],
    "mamba_kind": ["states", "content"],
    "mamba_block_size": [32, 16],
    "mamba_page": [2048, 4100],
    "shapes": [((8, 3), (4, 4)), ((24,), (4, 4)), ((3, 8), (16,))],
    "dtypes": [(torch.float16, torch.float32), (torch.bfloat16, torch.int32)],
    "mamba_first": [True],
    "layers": [2, 5],
    "mamba_layers": [1, 3],
}
MATTERS_NOT: dict[str, list[Any]] = {
    "num_blocks": [3, 4, 64],
    "extra_blocks": [1, 2],
    "offset": [64, 4096],
    "tail": [1, 1000],
    "prefix": ["language_model.layers"],
    "scratch": [True],
}


def build(**changes: Any) -> Any:
    o = BASE | changes
    extra = {
        "RSWASpec": {"rswa_window": 8},
        "SlidingWindowSpec": {"sliding_window": 8},
    }.get(o["kind"], {})
    quant = pools.interface.KVQuantMode(o["kv_quant_mode"])
    spec = pools.attention(
        o["kind"],
        o["block_size"],
        **{key: o[key] for key in ("num_kv_heads", "head_size", "dtype")},
        kv_quant_mode=quant,
        **extra,
    )
    states = pools.mamba(
        o["mamba_block_size"],
        o["shapes"],
        o["dtypes"],
        page_size_padded=o["mamba_page"],
    )
    options = {key: o[key] for key in ("extra_blocks", "offset", "tail")}
    pool = pools.Pool(o["num_blocks"], o["layout"], **options)
    attention = (spec, o["form"], o["kernel_block_size"], o["layers"])
    mamba = (states, o["mamba_kind"], None, o["mamba_layers"])
    if o["scratch"]:
        pool.add(pools.attention("EncoderOnlyAttentionSpec", 32))
    for added in (mamba, attention) if o["mamba_first"] else (attention, mamba):
        pool.add(*added)
    pool.bind()
    rename = {name: name.replace("layers", o["prefix"]) for name in pool.kv_caches}
    pool.kv_caches = {rename[name]: kv for name, kv in pool.kv_caches.items()}
    pool.layers = {rename[name]: layer for name, layer in pool.layers.items()}
    named = "layers" if pools.HAS_PLACEMENTS else "shared_by"
    for group in pool.groups:
        group.layer_names = [rename.get(name, name) for name in group.layer_names]
    for tensor in pool.tensors:
        setattr(tensor, named, [rename.get(n, n) for n in getattr(tensor, named)])
    return pool.build(attn_groups=[pool.attn_groups(o["backend"])])


def of_release(field: str, values: list[Any]) -> list[Any]:
    if field == "kind":
        return [kind for kind in values if hasattr(pools.interface, kind)]
    return values


def one_change(table: dict[str, list[Any]]) -> Any:
    return st.sampled_from(
        [(f, value) for f, values in table.items() for value in of_release(f, values)]
    )


def some_changes(table: dict[str, list[Any]]) -> Any:
    options = {
        f: st.sampled_from([BASE[f], *of_release(f, values)])
        for f, values in table.items()
    }
    return st.fixed_dictionaries({}, optional=options)


@given(changes=some_changes(MATTERS_NOT))
def test_what_engines_that_share_may_differ_in(
    changes: dict[str, Any], tally: Any
) -> None:
    assert build(**changes).fingerprint == build().fingerprint
    tally.example()


@given(change=one_change(MATTERS), changes=some_changes(MATTERS_NOT))
def test_what_orders_the_bytes(
    change: tuple[str, Any], changes: dict[str, Any], tally: Any
) -> None:
    assert build(**dict([change]), **changes).fingerprint != build().fingerprint
    tally.example()


def test_the_fingerprint_is_a_digest_of_json() -> None:
    caches = build()
    assert json.loads(json.dumps(caches.document)) == caches.document
    assert caches.fingerprint == logical_blocks.digest(caches.document)
    assert len(bytes.fromhex(caches.fingerprint)) == 32


def test_a_difference_can_be_told_field_by_field() -> None:
    here, there = build(scratch=True), build(scratch=True, kernel_block_size=32)
    assert here.document["layers"] == there.document["layers"]
    told = [
        (ours["kind"], key, ours[key], theirs[key])
        for ours, theirs in zip(here.document["formats"], there.document["formats"])
        for key in ours
        if ours[key] != theirs[key]
    ]
    assert ("FullAttentionSpec", "kernel_block_size", 16, 32) in told
    assert {key for _, key, _, _ in told} == {"kernel_block_size", "bound"}


def test_the_format_inside_a_latent_slot_matters() -> None:
    digests = {
        pools.Pool(4)
        .add(pools.mla(32, cache_dtype_str=cache_dtype), "rank3")
        .bind()
        .build()
        .fingerprint
        for cache_dtype in (None, "fp8_e4m3", "fp8_e5m2")
    }
    assert len(digests) == 3


def test_every_layer_counts_in_its_order() -> None:
    """bf16 and fp8 layers of one size in one group: which layer is which matters."""
    wide, narrow = pools.mla(32, 8), pools.mla(32, 16, dtype=torch.uint8)
    assert wide.page_size_bytes == narrow.page_size_bytes
    orders = [
        (wide, narrow, wide, narrow),
        (wide, wide, narrow, narrow),
        (wide, narrow, narrow, wide),
        (wide, narrow, wide),
        (wide, narrow, wide, narrow, wide),
    ]
    documents = [
        pools.Pool(4).add(order, "rank3").bind().build().document for order in orders
    ]
    assert len({logical_blocks.digest(d) for d in documents}) == len(orders)
    assert documents[0]["layers"] == [[0, 0], [0, 1], [0, 0], [0, 1]]


def test_the_order_is_the_order_of_registration() -> None:
    """Two runners bind the layers in another order: the config's order counts."""
    pool = pools.Pool(4).add([pools.mla(32), pools.mla(32, 16)], "rank3")
    pool.add(pools.full(32)).bind()
    pool.kv_caches["scratch"] = torch.zeros(3)
    expected = pool.build()
    pool.kv_caches = dict(reversed(pool.kv_caches.items()))
    caches = pool.build()
    assert list(caches) == ["layers.0", "layers.1", "layers.2", "scratch"]
    assert list(caches) == list(expected)
    assert caches.fingerprint == expected.fingerprint


@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_the_instruction_set_is_part_of_the_backend(isa: str) -> None:
    """What the kernels of a CPU pack by (vllm/v1/attention/backends/cpu_attn.py)."""
    pool = pools.Pool(4).add(pools.full(32)).bind()
    (group,) = pool.attn_groups("CPU_ATTN")
    group.metadata_builders = [SimpleNamespace(isa=isa)]
    (page_format,) = pool.build(attn_groups=[[group]]).document["formats"]
    assert page_format["backend"] == f"CPU_ATTN+{isa}"


@pytest.mark.parametrize(
    ("backend", "value", "name"),
    [
        ("ROCM_AITER_FA", "1", "ROCM_AITER_FA+shuffled"),
        ("ROCM_AITER_FA", "0", "ROCM_AITER_FA"),
        ("FLASH_ATTN", "1", "FLASH_ATTN"),
    ],
)
def test_shuffled_pages(
    backend: str, value: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", value)
    pool = pools.Pool(4).add(pools.full(32)).bind()
    groups = [pool.attn_groups(backend)]
    (page_format,) = pool.build(attn_groups=groups).document["formats"]
    assert page_format["backend"] == name


@st.composite
def small_pools(draw: Any) -> pools.Pool:
    """Pools of few choices, so that two are alike often enough to be compared."""
    pool = pools.Pool(3, draw(st.sampled_from(["NHD", "HND"])))
    for _ in range(draw(st.integers(1, 2))):
        kernel = draw(st.sampled_from([2, 4]))
        if draw(st.booleans()):
            dtypes = draw(st.permutations([torch.bfloat16, torch.float32]))
            spec = pools.mamba(4, [(4,), (4,)], dtypes, page_size_padded=32)
            pool.add(spec, "row", None, draw(st.integers(1, 2)))
            continue
        leaves = [
            pools.full(4, num_kv_heads=h, head_size=4 // h, dtype=d)
            for h, d in draw(
                st.lists(
                    st.sampled_from([(2, torch.uint8), (1, torch.uint8)]),
                    min_size=1,
                    max_size=2,
                )
            )
        ]
        pool.add(leaves, "rank4", kernel)
    return pool.bind()


def meaning(pool: pools.Pool) -> list[Any]:
    """Per layer in order of registration, what each byte of a page holds.

    Written down from the bound tensors' strides alone, byte by byte.
    """
    said = []
    for group_id, group in enumerate(pool.groups):
        for name in group.layer_names:
            layer, bound = pool.layers[name], pool.kv_caches[name]
            spec: Any = layer.spec
            page: list[Any] = [None] * layer.page
            if isinstance(spec, pools.MambaSpec):
                at = 0
                for i, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes)):
                    for byte in range(math.prod(shape) * dtype.itemsize):
                        page[at] = (i, str(dtype), byte)
                        at += 1
            else:
                k, tokens = layer.k, spec.block_size // layer.k
                item = bound.element_size()
                for j, h, n, c in itertools.product(
                    range(k), *(range(size) for size in bound.shape[1:])
                ):
                    strides = zip((j, h, n, c), bound.stride())
                    at = sum(i * stride for i, stride in strides) * item
                    for byte in range(item):
                        page[at + byte] = (j * tokens + n, h, c, byte, str(bound.dtype))
            said.append((group_id, type(spec), spec.block_size, page))
    return said


@settings(max_examples=4 * settings().max_examples)
@given(here=small_pools(), there=small_pools())
def test_equal_documents_mean_equal_bytes(
    here: pools.Pool, there: pools.Pool, tally: Any
) -> None:
    if here.build().document == there.build().document:
        assert meaning(here) == meaning(there)
    if meaning(here) != meaning(there):
        assert here.build().fingerprint != there.build().fingerprint
    tally.example()


@given(pool=small_pools())
def test_equal_pools_have_equal_documents(pool: pools.Pool, tally: Any) -> None:
    twin = pools.Pool(5, pool.kv_layout, offset=64, tail=7, extra_blocks=1)
    for group in pool.groups:
        layers = [pool.layers[name] for name in group.layer_names]
        k = layers[0].spec.block_size // layers[0].k
        is_uniform = isinstance(group.kv_cache_spec, pools.UniformTypeKVCacheSpecs)
        specs = [layer.spec for layer in layers]
        twin.add(specs if is_uniform else specs[0], layers[0].form, k, len(specs))
    assert twin.bind().build().document == pool.build().document
    assert meaning(twin) == meaning(pool)
    tally.example()
