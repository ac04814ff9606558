"""The fingerprint names the byte order inside pages: all of it, and nothing else."""

import json
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given

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
    # What engines that share may differ in:
    "num_blocks": 5,
    "extra_blocks": 0,
    "offset": 0,
    "tail": 0,
    "layers": 1,
    "mamba_layers": 2,
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
}
MATTERS_NOT: dict[str, list[Any]] = {
    "num_blocks": [3, 4, 64],
    "extra_blocks": [1, 2],
    "offset": [64, 4096],
    "tail": [1, 1000],
    "layers": [2, 5],
    "mamba_layers": [1, 3],
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
    for group in pool.groups:
        group.layer_names = [rename[name] for name in group.layer_names]
    pool.tensors.clear()
    backends = dict.fromkeys(pool.kv_caches, o["backend"])
    return pool.build(attn_backends=backends)


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
    tally.examples += 1


@given(change=one_change(MATTERS), changes=some_changes(MATTERS_NOT))
def test_what_orders_the_bytes(
    change: tuple[str, Any], changes: dict[str, Any], tally: Any
) -> None:
    assert build(**dict([change]), **changes).fingerprint != build().fingerprint
    tally.examples += 1


def test_the_fingerprint_is_a_digest_of_json() -> None:
    caches = build()
    assert len(bytes.fromhex(caches.fingerprint)) == 32
    assert json.loads(json.dumps(caches.byte_order)) == caches.byte_order


def test_a_difference_can_be_told_field_by_field() -> None:
    here, there = build(scratch=True), build(scratch=True, kernel_block_size=32)
    told = [
        (group_id, ours["kind"], key, ours[key], theirs[key])
        for group_id, groups in enumerate(zip(here.byte_order, there.byte_order))
        for ours, theirs in zip(*groups)
        for key in ours
        if ours[key] != theirs[key]
    ]
    assert (1, "FullAttentionSpec", "kernel_block_size", 16, 32) in told
    assert {key for *_, key, _, _ in told} == {"kernel_block_size", "bound"}


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


def test_formats_of_a_uniform_group_keep_their_order() -> None:
    leaves = [pools.mla(32), pools.mla(32, 16)]
    digests = set()
    for order in (leaves, leaves[::-1], leaves[:1]):
        digests.add(pools.Pool(4).add(order, "rank3").bind().build().fingerprint)
    assert len(digests) == 3
    more = pools.Pool(4).add([*leaves, *leaves], "rank3").bind().build()
    assert more.fingerprint in digests
