"""Every KV cache spec that the release defines is served, passed or refused."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

from tests.unit.overlay import lmcache, pools

WIDE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8}

SERVED: dict[str, Callable[[int], Any]] = {
    "AttentionSpec": lambda n: pools.attention("AttentionSpec", n),
    "FullAttentionSpec": pools.full,
    "TQFullAttentionSpec": lambda n: pools.attention(
        "TQFullAttentionSpec", n, tq_slot_size=12, dtype=torch.uint8
    ),
    "RSWASpec": lambda n: pools.attention("RSWASpec", n, rswa_window=64),
    "SinkFullAttentionSpec": lambda n: pools.attention(
        "SinkFullAttentionSpec", n, sink_len=4
    ),
    "ChunkedLocalAttentionSpec": lambda n: pools.attention(
        "ChunkedLocalAttentionSpec", n, attention_chunk_size=64
    ),
    "SlidingWindowSpec": lambda n: pools.attention(
        "SlidingWindowSpec", n, sliding_window=64
    ),
    "MLAAttentionSpec": pools.mla,
    "HiddenStateCacheSpec": lambda n: pools.attention(
        "HiddenStateCacheSpec", n, **WIDE
    ),
    "SlidingWindowMLASpec": lambda n: pools.attention(
        "SlidingWindowMLASpec", n, sliding_window=64, **WIDE
    ),
}
"""Attention kinds: a spec of the class, by its block size."""

PASSED: dict[str, Callable[[], Any]] = {
    "EncoderOnlyAttentionSpec": lambda: pools.attention("EncoderOnlyAttentionSpec", 32),
    "CircularBufferSpec": lambda: pools.attention("CircularBufferSpec", 32),
    "KpoolTailSpec": lambda: pools.attention("KpoolTailSpec", 32, sliding_window=64),
    "HiSparseHotSpec": lambda: interface.HiSparseHotSpec(
        block_size=32, page_size=512, blocks_per_request=2
    ),
    "HiSparseResidentSpec": lambda: interface.HiSparseResidentSpec(
        block_size=32, page_size=512
    ),
}
"""Kinds of which nothing is transferred."""

REFUSED: dict[str, Callable[[], Any]] = {
    "CrossAttentionSpec": lambda: pools.attention("CrossAttentionSpec", 32),
    "KVCacheSpec": lambda: interface.KVCacheSpec(block_size=32),
}
"""Kinds refused at start-up; the base class stands for any future kind."""

CONTAINERS = {"MambaSpec", "UniformTypeKVCacheSpecs"}
"""Served kinds with tests of their own (test_layouts.py)."""


def spec_classes() -> dict[str, str]:
    """Class name -> file, of every KVCacheSpec subclass in the release's sources."""
    bases: dict[str, tuple[str, set[str]]] = {}
    for root in vllm.__path__:
        for path in sorted(Path(root).rglob("*.py")):
            source = path.read_text()
            if not re.search(r"class \w+\([^)]*Spec", source):
                continue
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    names = {ast.unparse(base).split(".")[-1] for base in node.bases}
                    bases.setdefault(node.name, (str(path), names))
    found = {"KVCacheSpec"}
    while more := {n for n, (_, b) in bases.items() if b & found} - found:
        found |= more
    return {name: bases[name][0] for name in found}


def test_no_kind_is_forgotten() -> None:
    known = {*SERVED, *PASSED, *REFUSED, *CONTAINERS}
    example = "CustomFullAttentionSpec"  # in a docstring of some releases
    forgotten = {
        name: path
        for name, path in spec_classes().items()
        if name not in known and name != example
    }
    assert not forgotten, "neither served, passed nor refused on purpose"


def of_release(kinds: dict[str, Any]) -> list[str]:
    return [kind for kind in kinds if hasattr(interface, kind)]


@pytest.mark.parametrize("kernel_block_size", [32, 8])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", of_release(SERVED))
def test_served(kind: str, layout: str, kernel_block_size: int, tally: Any) -> None:
    pool = pools.Pool(4, layout)
    pool.add(SERVED[kind](32), "rank4", kernel_block_size, layers=2).bind()
    caches = pool.build()
    pools.check(pool, caches)
    is_raw = kernel_block_size == 32
    assert all((caches[n] is pool.kv_caches[n]) == is_raw for n in caches)
    tally.geometry()
    lmcache.judge(pool, caches)
    tally.add(lmcache.second_opinion(pool))


@pytest.mark.parametrize("kind", of_release(PASSED))
def test_passed(kind: str) -> None:
    pool = pools.Pool(4).add(pools.full(32)).bind()
    raw = torch.zeros(4096, dtype=torch.int8)
    pool.groups.append(KVCacheGroupSpec(["scratch"], PASSED[kind]()))
    pool.kv_caches["scratch"] = raw  # and no kernel block size: the last group
    caches = pool.build()
    assert caches["scratch"] is raw
    assert list(caches.blocks) == ["layers.0"]
    assert caches.document["layers"] == [[0, 0]]


@pytest.mark.parametrize("kind", of_release(REFUSED))
def test_refused(kind: str) -> None:
    pool = pools.Pool(4).add(pools.full(32)).bind()
    pool.groups.append(KVCacheGroupSpec(["other"], REFUSED[kind]()))
    pool.kv_caches["other"] = pool.kv_caches["layers.0"].clone()
    with pytest.raises(ValueError, match=f"group 1, layer 'other' \\({kind}\\)"):
        pool.build()


def test_encoder_only_layers_have_no_cache() -> None:
    pool = pools.Pool(4).add(pools.full(32)).bind()
    spec = PASSED["EncoderOnlyAttentionSpec"]()
    pool.groups.append(KVCacheGroupSpec(["encoder"], spec))
    assert list(pool.build()) == ["layers.0"]


def test_groups_out_of_transfer_pass() -> None:
    group = KVCacheGroupSpec(["replica"], pools.full(32))
    if not hasattr(group, "enable_kv_transfer"):
        pytest.skip("this release has no such groups")
    group.enable_kv_transfer, group.host_resident = False, True
    pool = pools.Pool(4).add(pools.full(32)).bind()
    pool.groups.append(group)
    pool.kernel_block_sizes.append(8)
    pool.kv_caches["replica"] = torch.zeros(7)
    assert pool.build()["replica"] is pool.kv_caches["replica"]


def test_transferred_groups_of_the_hosts_are_refused() -> None:
    """Their block ids count another pool's blocks."""
    pool = pools.Pool(4).add(pools.full(32)).bind()
    if not hasattr(pool.groups[0], "host_resident"):
        pytest.skip("this release has no such groups")
    pool.groups[0].host_resident = True
    with pytest.raises(ValueError, match="pool of the host's with block ids of its"):
        pool.build()


def test_a_scratch_leaf_of_a_uniform_group_passes() -> None:
    if not hasattr(interface, "CircularBufferSpec"):
        pytest.skip("this release has no scratch specs")
    pool = pools.Pool(4).add(pools.full(32)).bind()
    leaves = {"ring": pools.attention("CircularBufferSpec", 32)}
    spec = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=leaves)
    pool.groups.append(KVCacheGroupSpec(["ring"], spec))
    pool.kv_caches["ring"] = torch.zeros(7)
    assert pool.build()["ring"] is pool.kv_caches["ring"]
