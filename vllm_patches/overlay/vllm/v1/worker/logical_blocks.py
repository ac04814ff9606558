# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KV cache as its block ids address it.

A KV connector addresses the KV cache with the scheduler's block ids, while an
attention backend pages its tensor by whatever its kernels take. Here each layer's
tensor is viewed so that

    one block id = one page = one byte range of the storage.

Where the pages lie is what the KV cache config says; the tensor that the worker bound
is only checked against it. Everything else comes from the layer's spec, the kernel
block size of its block table and its attention backend. Views share the storage of the
tensor they replace; nothing is copied, allocated or computed before it is asked for.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs
from vllm.v1.worker import logical_blocks_compat as compat
from vllm.v1.worker.logical_blocks_geometry import (
    AttnBackend,
    Geometry,
    Layer,
    bound_tensors,
    elsewhere,
    geometry_of,
    kind_of,
)

logger = logging.getLogger(__name__)

CONTRACT_VERSION = 3
"""Version of what this module promises a connector: views, names, document."""


@dataclass(frozen=True, eq=False)
class LogicalBlocks:
    """Block id ``n``'s page starts at ``page_offset_bytes + n * block_stride_bytes``.

    It is ``page_size_bytes`` long, in the storage of one layer's KV cache.
    """

    block_size: int
    """Tokens per block id (the group's logical block size)."""
    kernel_block_size: int
    """Tokens per kernel page, the unit the attention kernels page by."""
    num_blocks: int
    """Block ids, and so pages."""
    page_size_bytes: int
    """Bytes of one page, padding included."""
    block_stride_bytes: int
    """Bytes from one page to the next. Other layers' pages may lie between."""
    slots_per_block: int
    """Slots the registered view shows per page; divides ``block_size``."""
    page_offset_bytes: int = field(repr=False)
    """Bytes from the start of the storage to page 0."""
    bound: torch.Tensor = field(repr=False)
    """A tensor the worker bound, whose storage holds the pages."""

    @property
    def blocks_per_kv_block(self) -> int:
        """Kernel pages per page, ``k``."""
        return self.block_size // self.kernel_block_size

    @property
    def pages(self) -> torch.Tensor:
        """The pages as raw bytes: uint8 ``[num_blocks, page_size_bytes]``.

        Strides are ``(block_stride_bytes, 1)``. Row ``n`` is exactly the bytes that
        belong to block id ``n``. Taken from the bound tensor's storage at each call,
        so it follows a connector that moves the storage.
        """
        shape = (self.num_blocks, self.page_size_bytes)
        return self.view(torch.uint8, shape, (self.block_stride_bytes, 1))

    def view(
        self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """View the storage from page 0 on; shape and stride in elements."""
        return torch.empty(0, dtype=dtype, device=self.bound.device).set_(
            self.bound.untyped_storage(),
            self.page_offset_bytes // dtype.itemsize,
            shape,
            stride,
        )


class LogicalKVCaches(Mapping[str, torch.Tensor]):
    """Layer name -> the tensor to register with a KV connector.

    Iterates over the layers that a connector transfers, group by group in the order of
    the KV cache config, then over the rest as bound: the order of registration. Lazy:
    the first view, blocks or document asked for does the work, or raises the
    ``ValueError`` that lists every layer that cannot be addressed by block ids.
    """

    contract_version = CONTRACT_VERSION

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, Any],
        kernel_block_sizes: Sequence[int],
        kv_layout: str | None = None,
        *,
        attn_groups: Iterable[Iterable[Any]] = (),
        shows_padding: bool = False,
    ) -> None:
        self.raw = kv_caches
        """The mapping the worker bound."""
        self._config = kv_cache_config
        self._kernel_block_sizes = kernel_block_sizes
        self._kv_layout = kv_layout or "NHD"
        self._attn_groups = attn_groups
        self._shows_padding = shows_padding

    def with_padding(self) -> "LogicalKVCaches":
        """The same, with the padding of pages in the views.

        For a connector that takes contiguous tensors only: views of pages that lie
        one after the other are contiguous then.
        """
        return LogicalKVCaches(
            self._config,
            self.raw,
            self._kernel_block_sizes,
            self._kv_layout,
            attn_groups=self._attn_groups,
            shows_padding=True,
        )

    @cached_property
    def _layers(self) -> list[Layer]:
        """The layers whose pages a connector transfers, in registration order."""
        backends = _attn_backends(self._attn_groups, self._kernel_block_sizes)
        return list(
            _transferred_layers(
                self._config,
                self.raw,
                self._kernel_block_sizes,
                backends,
                self._shows_padding,
            )
        )

    @cached_property
    def _paged(self) -> "_Paged":
        paged = _page(self._layers, self._config.num_blocks, self._kv_layout)
        grouped = {n for g in self._config.kv_cache_groups for n in g.layer_names}
        for name in self.raw.keys() - grouped:
            # A layer that no group names shares another one's cache, or has none.
            if owner := paged.owners.get(id(self.raw[name])):
                paged.views[name] = paged.views[owner]
                paged.blocks[name] = paged.blocks[owner]
        logger.info(
            "KV cache of %d layers viewed as its block ids address it: %d re-paged "
            "(contract version %d)",
            len(paged.blocks),
            sum(self.raw[name] is not view for name, view in paged.views.items()),
            CONTRACT_VERSION,
        )
        return paged

    @property
    def blocks(self) -> Mapping[str, LogicalBlocks]:
        """Layer name -> its pages. Layers that pass through unpaged have none."""
        return self._paged.blocks

    @cached_property
    def document(self) -> dict[str, Any]:
        """What decides the bytes of the pages, as JSON values.

        Every layer that is transferred, in registration order, as ``[group, index of
        its format]``, groups that are never transferred not counted, and the formats
        field by field. Equal for two workers that can read each other's pages, and
        only for them: it holds no pool size, address, layer name or process id.
        """
        groups = enumerate(self._config.kv_cache_groups)
        ids = [i for i, g in groups if compat.is_transferred(g, g.kv_cache_spec)]
        formats: list[dict[str, Any]] = []
        layers = []
        for layer in self._layers:
            page_format = _page_format(layer, self.blocks[layer.name])
            if page_format not in formats:
                formats.append(page_format)
            layers.append([ids.index(layer.group_id), formats.index(page_format)])
        return {"contract": CONTRACT_VERSION, "formats": formats, "layers": layers}

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of ``document``."""
        return digest(self.document)

    def __getitem__(self, layer_name: str) -> torch.Tensor:
        paged = self._paged
        return paged.views.get(layer_name, self.raw[layer_name])

    def __iter__(self) -> Iterator[str]:
        names = (layer.name for layer in self._layers if layer.name in self.raw)
        return iter(dict.fromkeys(names) | dict.fromkeys(self.raw))

    def __len__(self) -> int:
        return len(self.raw)


def build_logical_kv_caches(
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, Any],
    kernel_block_sizes: Sequence[int],
    kv_layout: str | None = None,
    *,
    attn_groups: Iterable[Iterable[Any]] = (),
) -> LogicalKVCaches:
    """View every layer's KV cache as pages addressed by block ids.

    - An attention layer already paged by its block id keeps its very tensor.
    - Others become opaque pages, whose dims are addresses only: ``[num_blocks, slots,
      1, C]`` or, head-major, ``[num_blocks, 1, slots, C]``; ``[num_blocks, slots, C]``
      for a tensor of three dims; ``[num_blocks, 2, slots, 1, C]`` where the release
      binds K and V as a dim of their own, or Mamba states one by one.
    - What is outside prefix caching or KV transfer, or has no KV cache, passes through.

    Args:
        kv_cache_config: The KV cache config the worker was initialized with.
        kv_caches: Layer name -> as bound: a tensor, or Mamba states (up to vLLM 0.25).
        kernel_block_sizes: Tokens per kernel page of each KV cache group, as its
            block table has it. Encoder-only groups at the end have no entry.
        kv_layout: Name of the resolved layout ("HND", "LBNHC", ...); None is "NHD".
        attn_groups: The worker's attention groups (vllm/v1/worker/utils.py), by KV
            cache group: which dim counts kernel pages, and what orders their bytes.

    Raises:
        ValueError: if block ids cannot address a layer. Lists every one with its
            group, the numbers that disagree and what to change.

    """
    caches = LogicalKVCaches(
        kv_cache_config,
        kv_caches,
        kernel_block_sizes,
        kv_layout,
        attn_groups=attn_groups,
    )
    caches.blocks  # noqa: B018 (raises what is refused)
    return caches


def digest(document: Any) -> str:
    """SHA-256 of a document of JSON values, hex; the order of keys does not count."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class _Paged(NamedTuple):
    """Layer name -> its view, and its pages; id() of a KV cache -> whose it is."""

    views: dict[str, Any]
    blocks: dict[str, LogicalBlocks]
    owners: dict[int, str]


def _transferred_layers(
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, Any],
    kernel_block_sizes: Sequence[int],
    backends: Mapping[str, AttnBackend],
    shows_padding: bool,
) -> Iterator[Layer]:
    """The layers that a connector transfers, each with its own leaf spec."""
    placements = compat.placements(kv_cache_config)
    sizes = dict(enumerate(kernel_block_sizes))
    specs: dict[int, Any] = {}
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        group_spec: Any = group.kv_cache_spec
        spec = group_spec
        for name in dict.fromkeys(group.layer_names):
            kv_cache = kv_caches.get(name)
            if isinstance(group_spec, UniformTypeKVCacheSpecs):
                spec = group_spec.kv_cache_specs.get(name)
                # A layer that shares another one's cache has no spec of its own.
                spec = spec or specs.get(id(kv_cache))
            if not compat.is_transferred(group, spec or group_spec):
                continue
            specs.setdefault(id(kv_cache), spec)
            yield Layer(
                name,
                group_id,
                spec,
                kv_cache,
                sizes.get(group_id),
                placements.get(name),
                backends.get(name, AttnBackend()),
                compat.is_host_resident(group),
                shows_padding,
            )


def _attn_backends(
    attn_groups: Iterable[Iterable[Any]], kernel_block_sizes: Sequence[int]
) -> dict[str, AttnBackend]:
    """Layer name -> what its attention group knows."""
    backends = {}
    for group in (group for groups in attn_groups for group in groups):
        name = group.backend.get_name()
        if size := getattr(group, "kernel_block_size", None):
            name += f"@{size}"  # It splits a packed KV cache by itself (0.32 on).
        for builder in group.metadata_builders[:1]:
            # The CPU's kernels pack a page as their instruction set takes it.
            name += f"+{isa}" if (isa := getattr(builder, "isa", "")) else ""
        if compat.is_shuffled(group.backend):
            name += "+shuffled"
        dims = (0, 1)
        if group.kv_cache_group_id < len(kernel_block_sizes):
            size = kernel_block_sizes[group.kv_cache_group_id]
            dims = compat.kernel_page_dims(group.backend, group.kv_cache_spec, size)
        backends.update(dict.fromkeys(group.layer_names, AttnBackend(name, *dims)))
    return backends


def _page(layers: Iterable[Layer], num_blocks: int, kv_layout: str) -> _Paged:
    """View every layer's pages.

    Raises:
        ValueError: if a layer is refused, listing every one of them.

    """
    views, blocks, refusals = dict[str, Any](), dict[str, LogicalBlocks](), []
    geometries: dict[Any, Geometry | str] = {}
    owners: dict[int, Layer] = {}
    for layer in layers:
        owner = owners.get(id(layer.kv_cache))
        if owner and owner.spec == layer.spec:
            views[layer.name], blocks[layer.name] = (
                views[owner.name],
                blocks[owner.name],
            )
            continue
        kind = kind_of(layer)
        if (geometry := geometries.get(kind)) is None:
            geometry = geometries[kind] = geometry_of(layer, num_blocks, kv_layout)
        if isinstance(geometry, str):
            refusals.append(f"{layer}: {geometry}")
            continue
        pages = _place(layer, geometry, num_blocks)
        if isinstance(pages, str):
            refusals.append(f"{layer}: {pages}")
            continue
        owners[id(layer.kv_cache)], blocks[layer.name] = layer, pages
        views[layer.name] = layer.kv_cache
        if geometry.view is not None:
            views[layer.name] = pages.view(*geometry.view)
    if refusals:
        lines = "".join(f"\n  - {refusal}" for refusal in refusals)
        raise ValueError(f"The KV cache cannot be addressed by block ids:{lines}")
    return _Paged(views, blocks, {key: layer.name for key, layer in owners.items()})


def _place(layer: Layer, geometry: Geometry, num_blocks: int) -> LogicalBlocks | str:
    """The layer's pages, or why the bound tensor does not hold them."""
    assert layer.placement is not None
    bound = bound_tensors(layer.kv_cache)[0]
    at = bound.storage_offset() * bound.element_size()
    offset = at if layer.placement.offset is None else layer.placement.offset
    page, stride = geometry.page_size, geometry.stride
    if at != offset:
        return elsewhere(at, stride, offset, stride)
    size = bound.untyped_storage().nbytes()
    if page > stride or offset + (num_blocks - 1) * stride + page > size:
        return (
            f"{num_blocks} pages of {page} bytes, {stride} apart from byte {offset} "
            f"on, overlap or pass the end of its {size}-byte storage. Bind tensors of "
            "the KV cache config's num_blocks."
        )
    return LogicalBlocks(
        block_size=geometry.block_size,
        kernel_block_size=geometry.kernel_block_size,
        num_blocks=num_blocks,
        page_size_bytes=page,
        block_stride_bytes=stride,
        slots_per_block=geometry.slots,
        page_offset_bytes=offset,
        bound=bound,
    )


def _page_format(layer: Layer, blocks: LogicalBlocks) -> dict[str, Any]:
    """What decides the order of the bytes in a page of this layer."""
    block_dim = layer.backend.block_dim
    return {
        "kind": type(layer.spec).__name__,
        "block_size": blocks.block_size,
        "kernel_block_size": blocks.kernel_block_size,
        "page_size_bytes": blocks.page_size_bytes,
        "slots_per_block": blocks.slots_per_block,
        "bound": [
            [str(tensor.dtype), *_inner_dims(tensor, block_dim)]
            for tensor in bound_tensors(layer.kv_cache)
        ],
        **compat.spec_facts(layer.spec),
        "backend": layer.backend.name,
    }


def _inner_dims(bound: torch.Tensor, block_dim: int) -> list[list[int]]:
    """``[size, stride]`` of the dims within a kernel page, in the shape's order.

    The stride of a dim of size 1 says nothing and is 0.
    """
    return [
        [size, stride if size > 1 else 0]
        for dim, (size, stride) in enumerate(zip(bound.shape, bound.stride()))
        if dim != block_dim
    ]
