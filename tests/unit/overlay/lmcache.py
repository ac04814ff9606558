"""LMCache as the judge of views, and its own edits as a second opinion."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from lmcache.integration.vllm.kv_cache_group_edits import apply_kv_cache_group_edits
from lmcache.integration.vllm.kv_cache_groups import create_engine_group_infos_from_vllm
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.utils import normalize_and_discover_per_layer_formats
from lmcache.v1.kv_layer_groups import KernelGroupInfo, KVLayerGroupsManager
from vllm.v1.worker.logical_blocks import LogicalKVCaches

from tests.unit.overlay import pools


def kernel_groups(pool: pools.Pool, views: dict[str, Any]) -> list[KernelGroupInfo]:
    """What LMCache derives from the views, as its connector and server do.

    Raises:
        ValueError: if LMCache does not take them.

    """
    hints: Any = pools.translate(pool.kv_layout)
    infos = create_engine_group_infos_from_vllm(pool.config, views, hints)
    index = {name: i for i, name in enumerate(views)}
    groups = [[index[name] for name in group.layer_names] for group in pool.groups]
    normalized, formats = normalize_and_discover_per_layer_formats(
        list(views.values()), groups, EngineType.VLLM, hints
    )
    chunk = math.lcm(*(layer.spec.block_size for layer in pool.layers.values()))
    manager = KVLayerGroupsManager(normalized, formats, infos, chunk)
    return manager.kernel_groups


def judge(pool: pools.Pool, caches: LogicalKVCaches) -> None:
    """The geometry that LMCache derives from every view must be the page's.

    With padding too.
    """
    for each in (caches, caches.with_padding()):
        _judge(pool, each)


def _judge(pool: pools.Pool, caches: LogicalKVCaches) -> None:
    names = list(caches)
    seen = set()
    for group in kernel_groups(pool, dict(caches.items())):
        shape: Any = group.shape_desc
        slot = shape.kv_size * shape.nh * shape.hs * shape.element_size
        for i in group.layer_indices:
            layer, blocks = pool.layers[names[i]], caches.blocks[names[i]]
            is_raw = caches[names[i]] is pool.kv_caches[names[i]]
            view = caches[names[i]]
            shown = pools.content_size(layer.spec)
            if not is_raw:
                shown = view[0].numel() * view.element_size()
            assert group.tokens_per_block == layer.spec.block_size
            assert group.slots_per_block == blocks.slots_per_block
            assert group.slots_per_block * slot == shown
            if shape.block_stride_elems:  # else LMCache takes pages to be dense
                stride = shape.block_stride_elems * shape.element_size
                assert stride == layer.stride
            else:
                assert pool.num_blocks == 1 or layer.stride == shown
            seen.add(names[i])
    assert seen == set(pool.layers)


@dataclass
class Opinion:
    """How LMCache's own edits serve the layers of a pool."""

    right: int = 0
    """Layers for which they address our bytes."""
    wrong: int = 0
    """Layers for which, without an error, they do not."""
    refused: int = 0
    """Layers of a pool that they do not take."""


def second_opinion(pool: pools.Pool) -> Opinion:
    """Compare LMCache's edits with the pool's true pages, block id by block id.

    An edited view that addresses other bytes than its layer's pages fails the test.
    """
    hints: Any = pools.translate(pool.kv_layout)
    try:
        edited = apply_kv_cache_group_edits(pool.config, pool.kv_caches, hints)
        kernel_groups(pool, edited)
    except ValueError:
        return Opinion(refused=len(pool.layers))
    opinion = Opinion()
    for name, layer in pool.layers.items():
        view = edited[name]
        right = _addresses(view, pool.num_blocks + pool.extra_blocks, layer)
        assert right or view is pool.kv_caches[name], f"{name}: {layer}"
        opinion.right += right
        opinion.wrong += not right
    return opinion


def _addresses(view: Any, num_blocks: int, layer: pools.Layer) -> bool:
    """Whether a view's dim of blocks walks the layer's pages, state bytes covered."""
    if not isinstance(view, torch.Tensor):
        return False
    dim = 1 if layer.form == "kv_first" else 0
    item = view.element_size()
    inner = [d for d in range(view.ndim) if d != dim]
    reach = sum((view.shape[d] - 1) * view.stride(d) for d in inner)
    return (
        view.shape[dim] == num_blocks
        and view.storage_offset() * item == layer.base
        and view.stride(dim) * item == layer.stride
        and pools.content_size(layer.spec) <= (reach + 1) * item <= layer.page
    )
