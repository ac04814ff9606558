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
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker import logical_blocks_compat as compat

logger = logging.getLogger(__name__)

CONTRACT_VERSION = 2
"""Version of what this module promises a connector: views, names, document."""

_PAGE_SPLITTING_LAYOUTS = ("LHBNC", "BHLNC")
_REUSABLE_MAMBA_CACHE_MODES = ("align", "all")


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


class AttnBackend(NamedTuple):
    """What an attention group knows of the tensors that its layers bind."""

    name: str = ""
    """The backend, and what it adds to the order of the bytes in a page."""
    block_dim: int = 0
    """The dim of the bound tensor that counts kernel pages."""
    planes: int = 1
    """2 where K and V are a dim of their own."""


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
    ) -> None:
        self.raw = kv_caches
        """The mapping the worker bound."""
        self._config = kv_cache_config
        self._kernel_block_sizes = kernel_block_sizes
        self._kv_layout = kv_layout or "NHD"
        self._attn_groups = attn_groups

    @cached_property
    def _layers(self) -> list["_Layer"]:
        """The layers whose pages a connector transfers, in registration order."""
        backends = _attn_backends(self._attn_groups, self._kernel_block_sizes)
        return list(
            _transferred_layers(
                self._config, self.raw, self._kernel_block_sizes, backends
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
    - A sub-paged attention layer, one whose slots do not divide its block size, and a
      Mamba page become opaque pages: their dims are addresses only,
      ``[num_blocks, slots, 1, C]`` or, head-major, ``[num_blocks, 1, slots, C]``, or
      ``[num_blocks, slots, C]`` for a tensor of three dims. Where the release binds K
      and V as a dim of their own, or Mamba states one by one, the view has two planes:
      ``[num_blocks, 2, slots, 1, C]``.
    - Groups outside prefix caching or KV transfer, without per-layer views, or
      without a KV cache pass through.

    Args:
        kv_cache_config: The KV cache config the worker was initialized with.
        kv_caches: Layer name -> KV cache as bound: a tensor, or the list of a Mamba
            layer's states (up to vLLM 0.25).
        kernel_block_sizes: Tokens per kernel page of each KV cache group, as its
            block table has it. Encoder-only groups at the end have no entry.
        kv_layout: Name of the resolved KV cache layout ("NHD", "HND", "LBNHC",
            "LBHNC", "BLNHC", "BLHNC"); None is token-major, as "NHD".
        attn_groups: The worker's attention groups (vllm/v1/worker/utils.py), by KV
            cache group: which dim counts kernel pages, and what orders their bytes.

    Raises:
        ValueError: if a layer cannot be addressed by block ids. Lists every such
            layer with its group, the numbers that disagree and what to change.

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


class _Layer(NamedTuple):
    """One layer of a KV cache group, and what is known of its KV cache."""

    name: str
    group_id: int
    spec: Any
    kv_cache: Any
    kernel_block_size: int | None  # Its group's.
    placement: compat.Placement | None
    backend: AttnBackend
    is_host_resident: bool

    def __str__(self) -> str:
        kind = type(self.spec).__name__
        return f"group {self.group_id}, layer {self.name!r} ({kind})"


class _KernelPages(NamedTuple):
    """How a bound tensor's kernel pages lie in memory, in bytes."""

    stride: int | None  # From one to the next; None for a single one.
    span: int  # From the first byte of one to the last.
    is_dense: bool  # Whether one has no bytes between its elements.


class _Geometry(NamedTuple):
    """What layers of one spec, shape and stride have in common."""

    block_size: int
    kernel_block_size: int
    page_size: int
    stride: int  # From one page to the next, in bytes.
    slots: int
    view: tuple[torch.dtype, list[int], list[int]] | None
    """The view's dtype, and its dims and strides in elements; None for the bound
    tensor itself."""


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
) -> Iterator[_Layer]:
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
            yield _Layer(
                name,
                group_id,
                spec,
                kv_cache,
                sizes.get(group_id),
                placements.get(name),
                backends.get(name, AttnBackend()),
                compat.is_host_resident(group),
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


def _page(layers: Iterable[_Layer], num_blocks: int, kv_layout: str) -> _Paged:
    """View every layer's pages.

    Raises:
        ValueError: if a layer is refused, listing every one of them.

    """
    views, blocks, refusals = dict[str, Any](), dict[str, LogicalBlocks](), []
    geometries: dict[Any, _Geometry | str] = {}
    owners: dict[int, _Layer] = {}
    for layer in layers:
        owner = owners.get(id(layer.kv_cache))
        if owner and owner.spec == layer.spec:
            views[layer.name], blocks[layer.name] = (
                views[owner.name],
                blocks[owner.name],
            )
            continue
        kind = _kind(layer)
        if (geometry := geometries.get(kind)) is None:
            geometry = geometries[kind] = _geometry(layer, num_blocks, kv_layout)
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


def _place(layer: _Layer, geometry: _Geometry, num_blocks: int) -> LogicalBlocks | str:
    """The layer's pages, or why the bound tensor does not hold them."""
    assert layer.placement is not None
    bound = _tensors(layer.kv_cache)[0]
    at = bound.storage_offset() * bound.element_size()
    offset = at if layer.placement.offset is None else layer.placement.offset
    page, stride = geometry.page_size, geometry.stride
    if at != offset:
        return _elsewhere(at, stride, offset, stride)
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


def _elsewhere(at: int, apart: int, offset: int | None, stride: int) -> str:
    return (
        f"its pages start at byte {at} and lie {apart} apart, the KV cache config puts "
        f"them at byte {at if offset is None else offset}, {stride} apart. Bind the "
        "tensors that the config describes."
    )


def _tensors(kv_cache: Any) -> Sequence[Any]:
    """The tensors bound for a layer: one, or a Mamba layer's states (up to 0.25)."""
    return kv_cache if isinstance(kv_cache, (list, tuple)) else (kv_cache,)


def _kind(layer: _Layer) -> Any:
    """Equal for layers that differ in nothing but their name and their place."""
    tensors = _tensors(layer.kv_cache)
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return layer.name
    return (
        id(layer.spec),
        layer.group_id,
        layer.backend,
        layer.placement and layer.placement.block_stride,
        type(layer.kv_cache),
        *((t.shape, t.stride(), t.dtype, t.device) for t in tensors),
        *(t.data_ptr() - tensors[0].data_ptr() for t in tensors[1:]),
    )


def _geometry(layer: _Layer, num_blocks: int, kv_layout: str) -> _Geometry | str:
    """How the layer's pages are viewed, or why they cannot be."""
    if isinstance(layer.spec, CrossAttentionSpec):
        return (
            "cross attention caches the encoder's output, which no prompt prefix "
            "identifies. Run this model without this KV connector."
        )
    if layer.kv_cache is None:
        return (
            "no KV cache was bound for it. Hand over the cache of every layer in the "
            "KV cache config."
        )
    if layer.is_host_resident:
        return (
            "its pages lie in a pool of the host's with block ids of its own. Run this "
            "model without this KV connector, or without that pool."
        )
    if layer.placement is None:
        return (
            "the KV cache config places no tensor for it. Hand over the config that "
            "its KV cache was allocated by."
        )
    if isinstance(layer.spec, MambaSpec):
        return _mamba_geometry(layer, num_blocks, kv_layout)
    if isinstance(layer.spec, AttentionSpec):
        return _attention_geometry(layer, num_blocks, kv_layout)
    kind = "no spec" if layer.spec is None else type(layer.spec).__name__
    return (
        f"the page of a layer with {kind} is unknown. Exclude its group from KV "
        "transfer, or run this model without this KV connector."
    )


def _attention_geometry(
    layer: _Layer, num_blocks: int, kv_layout: str
) -> _Geometry | str:
    spec, bound = layer.spec, layer.kv_cache
    if layer.kernel_block_size is None:
        return (
            "its group has no kernel block size. Hand over one for every KV cache "
            "group with a block table."
        )
    block_size = spec.block_size
    kernel_block_size = compat.layer_kernel_block_size(spec, layer.kernel_block_size)
    if kernel_block_size <= 0 or block_size % kernel_block_size:
        return (
            f"kernel block size {kernel_block_size} does not divide block size "
            f"{block_size}. Set --block-size to a multiple of the backend's kernel "
            "block size."
        )
    if kv_layout in _PAGE_SPLITTING_LAYOUTS:
        return (
            f"KV cache layout {kv_layout} splits its page by head. Set "
            "VLLM_KV_CACHE_LAYOUT to LBNHC, LBHNC, BLNHC or BLHNC."
        )
    k = block_size // kernel_block_size
    kernel_pages = _kernel_pages(bound, layer.backend.block_dim, num_blocks * k)
    if isinstance(kernel_pages, str):
        return kernel_pages
    if reason := _not_whole(spec, kernel_pages, k):
        return reason
    stride = kernel_pages.stride and kernel_pages.stride * k
    slots = compat.num_states(spec)
    is_whole = k == 1 and block_size % slots == 0
    planes = None if is_whole else layer.backend.planes
    shape = (slots, planes, bound.ndim, kv_layout)
    return _view(layer, kernel_block_size, num_blocks, stride, *shape)


def _mamba_geometry(layer: _Layer, num_blocks: int, kv_layout: str) -> _Geometry | str:
    spec, bound = layer.spec, layer.kv_cache
    if spec.mamba_cache_mode not in _REUSABLE_MAMBA_CACHE_MODES:
        return (
            f"mamba_cache_mode {spec.mamba_cache_mode!r} keeps no state at block "
            "boundaries that could be reused. Set --enable-prefix-caching and "
            "--mamba-cache-mode align."
        )
    sizes = [
        math.prod(shape) * dtype.itemsize
        for shape, dtype in zip(spec.shapes, spec.dtypes)
    ]
    tensors = _tensors(bound)
    rows = [_kernel_pages(tensor, 0, num_blocks) for tensor in tensors]
    for row in rows:
        if isinstance(row, str):
            return row
    strides = {row.stride for row in rows if not isinstance(row, str)}
    if isinstance(bound, torch.Tensor):
        planes, ndim, page = 1, bound.ndim, spec.page_size_bytes
        if not sum(sizes) <= (span := rows[0].span) <= page:  # type: ignore[union-attr]
            return (
                f"its tensor holds {span} bytes per block, its spec's states "
                f"{sum(sizes)} and its page {page}. Bind whole pages."
            )
    else:
        # Up to vLLM 0.25, where connectors parse K and V planes.
        planes, ndim = 2, 5
        base = min((tensor.data_ptr() for tensor in tensors), default=0)
        offsets = [tensor.data_ptr() - base for tensor in tensors]
        expected = [sum(sizes[:i]) for i in range(len(sizes))]
        if len(strides) != 1 or offsets != expected:
            return (
                f"its states lie at bytes {offsets} of a page, {[*strides]} apart; its "
                f"spec puts them at {expected}, {spec.page_size_bytes} apart. Bind the "
                "states in the order of the spec's shapes, from the page's base."
            )
    tokens, stride = spec.block_size, strides.pop()
    shape = (tokens, planes, ndim, kv_layout)
    return _view(layer, tokens, num_blocks, stride, *shape)


def _kernel_pages(bound: Any, block_dim: int, num_pages: int) -> _KernelPages | str:
    """How the tensor's kernel pages lie in memory, or why they are not paged."""
    if not isinstance(bound, torch.Tensor) or bound.device.type == "meta":
        where = getattr(bound, "device", type(bound).__name__)
        return (
            f"its KV cache ({where}) has no storage to view. Bind a tensor that is "
            "allocated on a device."
        )
    shape, strides = tuple(bound.shape), bound.stride()
    dims = enumerate(zip(strides, shape))
    inner = [(stride, n) for dim, (stride, n) in dims if dim != block_dim and n != 1]
    is_paged = len(shape) > block_dim and shape[block_dim] >= num_pages
    if not is_paged or (num_pages > 1 and inner and max(inner)[0] > strides[block_dim]):
        return (
            f"the outermost dim in memory of its tensor (shape {shape}, strides "
            f"{strides}) is not that of {num_pages} kernel pages (dim {block_dim}), so "
            "a page is no single byte range. Use an attention backend and a "
            "VLLM_KV_CACHE_LAYOUT that keep a block's heads, K and V together."
        )
    item = bound.element_size()
    span = 1 + sum((n - 1) * stride for stride, n in inner)
    is_dense = span == math.prod(n for _, n in inner)
    stride = None if shape[block_dim] == 1 else strides[block_dim] * item
    return _KernelPages(stride, span * item, is_dense)


def _not_whole(spec: Any, kernel_pages: _KernelPages, k: int) -> str | None:
    """Why k kernel pages are not the spec's page, if they are not."""
    page, span = spec.page_size_bytes, kernel_pages.span
    if k == 1:
        unpadded = compat.unpadded_page_size_bytes(spec)
        if span == page or (kernel_pages.is_dense and unpadded <= span < page):
            return None
        return (
            f"its tensor holds {span} bytes per block, its spec's page {page}. Use an "
            "attention backend whose KV cache has the spec's page size."
        )
    stride, tokens = kernel_pages.stride or span, spec.block_size // k
    if kernel_pages.is_dense and span == stride and span * k == page:
        return None
    return (
        f"{k} kernel pages of {tokens} tokens, {span} bytes each and {stride} apart, "
        f"do not tile the {page}-byte page of {spec.block_size} tokens. Set "
        f"--block-size to {tokens}."
    )


def _view(
    layer: _Layer,
    kernel_block_size: int,
    num_blocks: int,
    bound_stride: int | None,
    slots: int,
    planes: int | None,
    ndim: int,
    kv_layout: str,
) -> _Geometry | str:
    """The geometry of pages that lie ``bound_stride`` bytes apart in their tensor.

    Without planes the tensor stays as it is; with them, a page is shown as so many
    times the most equal slots that fit.
    """
    spec, bound = layer.spec, _tensors(layer.kv_cache)[0]
    page, tokens = spec.page_size_bytes, spec.block_size
    assert layer.placement is not None
    stride = layer.placement.block_stride or page
    if bound_stride not in (None, stride):
        at = bound.storage_offset() * bound.element_size()
        return _elsewhere(at, bound_stride, layer.placement.offset, stride)
    if planes is None:
        return _Geometry(tokens, kernel_block_size, page, stride, slots, None)
    dtype = torch.uint8 if page % bound.dtype.itemsize else bound.dtype
    # Transfer kernels copy a slot by words, of two bytes at least.
    word = max(dtype.itemsize, 2 - page % 2)
    if page % (planes * word):
        planes, ndim = 1, 4
    slots = math.gcd(slots, tokens, page // (planes * word))
    dims = [slots, page // (planes * slots * dtype.itemsize)]
    if ndim > 3:
        dims.insert("NH" in kv_layout, 1)  # The one head, in or around its slots.
    if planes > 1:
        dims.insert(0, planes)
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    view = (dtype, [num_blocks, *dims], [stride // dtype.itemsize, *strides])
    return _Geometry(tokens, kernel_block_size, page, stride, slots, view)


def _page_format(layer: _Layer, blocks: LogicalBlocks) -> dict[str, Any]:
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
            for tensor in _tensors(layer.kv_cache)
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
