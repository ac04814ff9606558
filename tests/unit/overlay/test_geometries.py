"""Geometries met in the field, as numbers: tests/data/geometries.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.overlay import lmcache, pools

CASES = json.loads((Path(__file__).parents[2] / "data" / "geometries.json").read_text())


def make_spec(case: dict[str, Any]) -> Any:
    block_size = case["block_size"]
    if case["kind"] == "mamba":
        dtypes = [getattr(torch, name) for name in case["dtypes"]]
        shapes = [tuple(shape) for shape in case["shapes"]]
        padded = case.get("page_size_padded")
        return pools.mamba(block_size, shapes, dtypes, page_size_padded=padded)
    dtype = getattr(torch, case["dtype"])
    if case["kind"] == "mla":
        ratio = case.get("ratio", 1)
        return pools.mla(block_size, case["width"], ratio, dtype=dtype)
    shape = {key: case[key] for key in ("num_kv_heads", "head_size")}
    return pools.full(block_size, dtype=dtype, **shape)


def make_pool(case: dict[str, Any]) -> tuple[pools.Pool, list[dict[str, Any]]]:
    """The pool, and what to expect of each of its layers."""
    options = {key: case[key] for key in ("offset", "tail") if key in case}
    blocks_first = case.get("blocks_first", False)
    pool = pools.Pool(3, case["layout"], blocks_first, **options)
    expected: list[dict[str, Any]] = []
    for group in case["groups"]:
        kernel_block_size = group.get("kernel_block_size")
        if group["kind"] == "uniform":
            specs = [make_spec(leaf) for leaf in group["layers"]]
            forms = [leaf["form"] for leaf in group["layers"]]
            pool.add(specs, forms, kernel_block_size)
            expected += group["layers"]
        else:
            layers = group.get("layers", 1)
            pool.add(make_spec(group), group["form"], kernel_block_size, layers)
            expected += [group] * layers
    return pool.bind(), expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_geometry(case: dict[str, Any], tally: Any) -> None:
    if case.get("needs") == "tokens_per_state" and not pools.HAS_TOKENS_PER_STATE:
        pytest.skip("this release never splits a compressed page")
    pool, expected = make_pool(case)
    caches = pool.build()
    pools.check(pool, caches)
    for (name, view), layer in zip(caches.items(), expected):
        blocks = caches.blocks[name]
        assert blocks.page_size_bytes == layer["page"]
        if "content" in layer:
            assert pools.content_size(pool.layers[name].spec) == layer["content"]
        if "slots" in layer:
            assert blocks.slots_per_block == layer["slots"]
        if layer["view"] == "raw":
            assert view is pool.kv_caches[name]
        else:
            assert list(view.shape[1:]) == layer["view"]
        if "view_dtype" in layer:
            assert view.dtype == getattr(torch, layer["view_dtype"])
    tally.geometry()
    lmcache.judge(pool, caches)
    tally.add(lmcache.second_opinion(pool))
