# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KV cache as its block ids address it.

A KV connector addresses the KV cache with the scheduler's block ids, while an
attention backend pages its tensor by whatever its kernels take. This module
re-views each layer's tensor so that

    one block id = one page = one byte range of the storage.

Paging is decided from metadata alone: the layer's KV cache spec, the kernel
block size its block table was built with, the tensor's byte strides and the
placement that the KV cache config gives it. Every view shares the storage of the
tensor it replaces; nothing is copied or allocated.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

logger = logging.getLogger(__name__)

CONTRACT_VERSION = 1
"""Version of what this module promises a connector: views, names, fingerprint."""

_PAGE_SPLITTING_LAYOUTS = ("LHBNC", "BHLNC")
_REUSABLE_MAMBA_CACHE_MODES = ("align", "all")


@dataclass(frozen=True, eq=False)
class LogicalBlocks:
    """How block ids address the storage of one layer's KV cache."""

    block_size: int
    """Tokens per block id (the group's logical block size)."""
    kernel_block_size: int
    """Tokens per kernel block, the unit the attention kernels page by."""
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
        """Kernel blocks per block id, ``k``."""
        return self.block_size // self.kernel_block_size

    @property
    def pages(self) -> torch.Tensor:
        """The pages as raw bytes: uint8 ``[num_blocks, page_size_bytes]``.

        Strides are ``(block_stride_bytes, 1)``. Row ``n`` is exactly the bytes that
        belong to block id ``n``. Taken from the bound tensor's storage at each call,
        so it follows a connector that moves the storage.
        """
        return self.view(
            torch.uint8,
            (self.num_blocks, self.page_size_bytes),
            (self.block_stride_bytes, 1),
        )

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

    Iterates in the order of ``raw``. Reading a view, or the fingerprint, of caches
    that hold refused layers raises the ``ValueError`` that lists them all; ``raw``
    and ``blocks`` stay readable.
    """

    contract_version = CONTRACT_VERSION

    def __init__(
        self,
        raw: Mapping[str, Any],
        views: Mapping[str, Any],
        blocks: Mapping[str, LogicalBlocks],
        byte_order: Sequence[Sequence[Mapping[str, Any]]],
        refusals: Sequence[str] = (),
    ) -> None:
        self.raw = raw
        """The mapping the worker bound."""
        self.blocks = blocks
        """Layer name -> its pages. Layers that pass through unpaged have none."""
        self.byte_order = byte_order
        """Group id -> the distinct page formats in it, field by field; none for a
        group that passes through. What ``fingerprint`` digests."""
        self.refusals = refusals
        """One line per layer that cannot be addressed by block ids."""
        self._views = views

    def check_served(self) -> None:
        """Raises:
        ValueError: if any layer was refused, listing every one of them.

        """
        if self.refusals:
            raise ValueError(
                "The KV cache cannot be addressed by block ids:"
                + "".join(f"\n  - {refusal}" for refusal in self.refusals)
            )

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the byte order inside the pages.

        Equal for two engines that can read each other's pages. Holds nothing that
        such engines may differ in: no pool size, address, layer name or process id.
        """
        self.check_served()
        groups = [formats for formats in self.byte_order if formats]
        document = {"contract": CONTRACT_VERSION, "groups": groups}
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __getitem__(self, layer_name: str) -> torch.Tensor:
        self.check_served()
        return self._views[layer_name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def build_logical_kv_caches(
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, Any],
    kernel_block_sizes: Sequence[int],
    kv_layout: str | None = None,
    *,
    attn_backends: Mapping[str, str] | None = None,
    strict: bool = True,
) -> LogicalKVCaches:
    """View every layer's KV cache as pages addressed by block ids.

    - An attention layer already paged by its block id keeps its very tensor.
    - A sub-paged attention layer, one whose slots do not divide its block size, and a
      Mamba page become opaque pages: their dims are addresses only,
      ``[num_blocks, slots, 1, C]`` or, head-major, ``[num_blocks, 1, slots, C]``,
      with as many dims as the tensor bound. Where the release binds K and V as a dim
      of size 2, or Mamba states one by one, the view has two planes:
      ``[num_blocks, 2, slots, 1, C]``.
    - Groups outside prefix caching or KV transfer, without per-layer views, or
      without a KV cache pass through.

    Args:
        kv_cache_config: The KV cache config the worker was initialized with.
        kv_caches: Layer name -> KV cache as bound: a tensor, or the list of a Mamba
            layer's states (up to vLLM 0.25).
        kernel_block_sizes: Tokens per kernel block of each KV cache group, as its
            block table has it. Encoder-only groups at the end have no entry.
        kv_layout: Name of the resolved KV cache layout ("NHD", "HND", "LBNHC",
            "LBHNC", "BLNHC", "BLHNC"); None is token-major, as "NHD".
        attn_backends: Layer name -> attention backend, for the fingerprint.
        strict: Raise if a layer is refused. Otherwise the caches carry the refusals
            and raise them to the connector that asks for a view.

    Raises:
        ValueError: if a layer cannot be addressed by block ids. Lists every such
            layer with its group, the numbers that disagree and what to change.

    """
    builder = _Builder(kv_cache_config, kv_caches, kv_layout, attn_backends or {})
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        kernel_block_size = (
            kernel_block_sizes[group_id] if group_id < len(kernel_block_sizes) else None
        )
        builder.add_group(group_id, group, kernel_block_size)
    caches = builder.finish()
    logger.info(
        "KV cache of %d layers viewed as its block ids address it: %d re-paged, "
        "%d refused (contract version %d)",
        len(caches.blocks),
        sum(caches.raw[name] is not view for name, view in builder.views.items()),
        len(caches.refusals),
        CONTRACT_VERSION,
    )
    if strict:
        caches.check_served()
    return caches


def attn_backend_names(attn_groups: Iterable[Iterable[Any]]) -> dict[str, str]:
    """Layer name -> the attention backend that orders the bytes of its pages.

    A backend that splits a packed KV cache by itself (vLLM 0.32 on,
    ``AttentionGroup.kernel_block_size``) is named with its kernel block size.
    """
    names = {}
    for groups in attn_groups:
        for group in groups:
            name = group.backend.get_name()
            if kernel_block_size := getattr(group, "kernel_block_size", None):
                name += f"@{kernel_block_size}"
            names.update(dict.fromkeys(group.layer_names, name))
    return names


def num_states(spec: Any) -> int:
    """Slots that a page of this spec declares.

    ``block_size`` unless the spec declares slot compression: ``tokens_per_state``
    (vLLM 0.29 on), ``compress_ratio`` and so ``storage_block_size`` (up to 0.28).
    """
    if (declared := getattr(spec, "num_states", None)) is not None:
        return declared
    return spec.storage_block_size


def _layer_kernel_block_size(spec: KVCacheSpec, kernel_block_size: int) -> int:
    """Tokens per kernel block of one layer, where its spec overrides its group's."""
    storage_block_size = getattr(spec, "storage_block_size", None)
    if hasattr(spec, "tokens_per_state"):
        # vLLM 0.29 to 0.31: the layer's own kernel block size.
        return storage_block_size or kernel_block_size
    # Up to vLLM 0.28: slots. A compressed page is never split.
    is_compressed = storage_block_size != spec.block_size
    return spec.block_size if is_compressed else kernel_block_size


@dataclass(frozen=True)
class _Placement:
    """Where the KV cache config puts a layer in its allocation, in bytes.

    None where it does not say; a block stride of 0 is the page itself.
    """

    block_stride: int | None = None
    offset: int | None = None


def _placements(kv_cache_config: KVCacheConfig) -> dict[str, _Placement]:
    placements = {}
    tensors: list[Any] = kv_cache_config.kv_cache_tensors
    for tensor in tensors:
        if hasattr(tensor, "layers"):
            # vLLM 0.29 on: one allocation for all layers.
            for i, layer_name in enumerate(tensor.layers):
                placements[layer_name] = _Placement(
                    tensor.block_stride, tensor.offset + i * tensor.layer_stride
                )
        else:
            # Up to vLLM 0.28: one allocation per tensor, unless packed.
            offset = tensor.offset if tensor.block_stride else None
            placement = _Placement(tensor.block_stride, offset)
            placements.update(dict.fromkeys(tensor.shared_by, placement))
    return placements


class _Builder:
    """Collects the views, and every refusal rather than the first."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, Any],
        kv_layout: str | None,
        attn_backends: Mapping[str, str],
    ) -> None:
        self.num_blocks = kv_cache_config.num_blocks
        self.raw = kv_caches
        self.kv_layout = kv_layout or "NHD"
        self.attn_backends = attn_backends
        self.placements = _placements(kv_cache_config)
        self.views: dict[str, Any] = dict(kv_caches)
        self.blocks: dict[str, LogicalBlocks] = {}
        # Layers that share another layer's cache are bound to the same object.
        self.owners: dict[int, tuple[str, KVCacheSpec]] = {}
        self.ungrouped = dict.fromkeys(kv_caches)
        self.byte_order: list[list[dict[str, Any]]] = []
        self.refusals: list[str] = []

    def add_group(
        self, group_id: int, group: KVCacheGroupSpec, kernel_block_size: int | None
    ) -> None:
        group_spec = group.kv_cache_spec
        formats: list[dict[str, Any]] = []
        for layer_name in group.layer_names:
            self.ungrouped.pop(layer_name, None)
            spec: KVCacheSpec | None = group_spec
            if isinstance(group_spec, UniformTypeKVCacheSpecs):
                spec = group_spec.kv_cache_specs.get(layer_name)
            if _passes_through(group, spec or group_spec):
                continue
            try:
                page_format = self._add_layer(layer_name, spec, kernel_block_size)
            except ValueError as e:
                kind = type(spec or group_spec).__name__
                self.refusals.append(
                    f"group {group_id}, layer {layer_name!r} ({kind}): {e}"
                )
                continue
            if page_format is not None and page_format not in formats:
                formats.append(page_format)
        self.byte_order.append(formats)

    def finish(self) -> LogicalKVCaches:
        # Sharing layers that no group names (V2 model runner) follow their target.
        for layer_name in self.ungrouped:
            self._follow_owner(layer_name, None)
        return LogicalKVCaches(
            self.raw, self.views, self.blocks, self.byte_order, tuple(self.refusals)
        )

    def _follow_owner(self, layer_name: str, spec: KVCacheSpec | None) -> bool:
        """Take over the view of the layer whose cache this one shares, if any."""
        owner, owner_spec = self.owners.get(id(self.raw[layer_name]), (None, None))
        if owner is None or (spec is not None and spec != owner_spec):
            return False
        self.views[layer_name] = self.views[owner]
        self.blocks[layer_name] = self.blocks[owner]
        return True

    def _add_layer(
        self, layer_name: str, spec: KVCacheSpec | None, kernel_block_size: int | None
    ) -> dict[str, Any] | None:
        """Add one layer's view; returns its page format, None if it is shared."""
        if isinstance(spec, CrossAttentionSpec):
            raise ValueError(
                "cross attention caches the encoder's output, which no prompt prefix "
                "identifies. Run this model without this KV connector."
            )
        if (kv_cache := self.raw.get(layer_name)) is None:
            raise ValueError(
                f"no KV cache was bound for it, only for {len(self.raw)} others. Hand "
                "over the cache of every layer in the KV cache config."
            )
        if self._follow_owner(layer_name, spec):
            return None
        if isinstance(spec, MambaSpec):
            view, blocks = self._mamba_pages(layer_name, spec, kv_cache)
        elif isinstance(spec, AttentionSpec):
            view, blocks = self._attention_pages(
                layer_name, spec, kv_cache, kernel_block_size
            )
        else:
            kind = "no spec" if spec is None else type(spec).__name__
            raise ValueError(
                f"the page of a layer with {kind} is unknown. Exclude its group from "
                "KV transfer, or run this model without this KV connector."
            )
        self.views[layer_name] = view
        self.blocks[layer_name] = blocks
        self.owners[id(kv_cache)] = (layer_name, spec)
        backend = self.attn_backends.get(layer_name, "")
        return _page_format(spec, kv_cache, blocks, backend)

    def _attention_pages(
        self,
        layer_name: str,
        spec: AttentionSpec,
        kv_cache: torch.Tensor,
        kernel_block_size: int | None,
    ) -> tuple[torch.Tensor, LogicalBlocks]:
        if kernel_block_size is None:
            raise ValueError(
                "its group has no kernel block size. Hand over one for every KV cache "
                "group with a block table."
            )
        block_size, page = spec.block_size, spec.page_size_bytes
        kernel_block_size = _layer_kernel_block_size(spec, kernel_block_size)
        if kernel_block_size <= 0 or block_size % kernel_block_size:
            raise ValueError(
                f"kernel block size {kernel_block_size} does not divide block size "
                f"{block_size}. Set --block-size to a multiple of the backend's kernel "
                "block size."
            )
        if self.kv_layout in _PAGE_SPLITTING_LAYOUTS:
            raise ValueError(
                f"KV cache layout {self.kv_layout} splits its page by head. Set "
                "VLLM_KV_CACHE_LAYOUT to LBNHC, LBHNC, BLNHC or BLHNC."
            )
        k = block_size // kernel_block_size
        stride, content, is_dense = self._kernel_pages(layer_name, kv_cache, k)
        if k > 1 and not (is_dense and content * k == page == (stride or content) * k):
            raise ValueError(
                f"{k} kernel pages of {kernel_block_size} tokens, {content} bytes each "
                f"and {stride} apart, do not tile the {page}-byte page of {block_size} "
                f"tokens. Set --block-size to {kernel_block_size}."
            )
        # Named so from vLLM 0.26 on; before, only without the scales it may hold.
        unpadded = getattr(spec, "unpadded_page_size_bytes", spec.real_page_size_bytes)
        is_padded = is_dense and unpadded <= content < page
        if k == 1 and content != page and not is_padded:
            raise ValueError(
                f"its tensor holds {content} bytes per block, its spec's page {page}. "
                "Use an attention backend whose KV cache has the spec's page size."
            )
        slots = num_states(spec)
        blocks = self._logical_blocks(
            layer_name, spec, kernel_block_size, stride and stride * k, slots, kv_cache
        )
        if k == 1 and block_size % slots == 0:
            return kv_cache, blocks
        planes = 2 if kv_cache.ndim == 5 else 1
        return self._opaque_view(blocks, planes, kv_cache.ndim)

    def _mamba_pages(
        self,
        layer_name: str,
        spec: MambaSpec,
        kv_cache: torch.Tensor | list[torch.Tensor],
    ) -> tuple[torch.Tensor, LogicalBlocks]:
        if spec.mamba_cache_mode not in _REUSABLE_MAMBA_CACHE_MODES:
            raise ValueError(
                f"mamba_cache_mode {spec.mamba_cache_mode!r} keeps no state at block "
                "boundaries that could be reused. Set --enable-prefix-caching and "
                "--mamba-cache-mode align."
            )
        page = spec.page_size_bytes
        if isinstance(kv_cache, torch.Tensor):
            bound, planes, ndim = kv_cache, 1, kv_cache.ndim
            stride, content, _ = self._kernel_pages(layer_name, kv_cache, 1)
            state_bytes = sum(_state_sizes(spec))
            if not state_bytes <= content <= page:
                raise ValueError(
                    f"its tensor holds {content} bytes per block, its spec's states "
                    f"{state_bytes} and its page {page}. Bind whole pages."
                )
        else:
            # Up to vLLM 0.25, where connectors parse K and V planes.
            stride = self._mamba_state_stride(layer_name, spec, kv_cache)
            bound, planes, ndim = kv_cache[0], 2, 5
        blocks = self._logical_blocks(
            layer_name, spec, spec.block_size, stride, spec.block_size, bound
        )
        return self._opaque_view(blocks, planes, ndim)

    def _mamba_state_stride(
        self, layer_name: str, spec: MambaSpec, states: list[torch.Tensor]
    ) -> int | None:
        """Bytes between the pages of states bound one by one, back to back."""
        strides = {self._kernel_pages(layer_name, state, 1)[0] for state in states}
        base = min((state.data_ptr() for state in states), default=0)
        offsets = [state.data_ptr() - base for state in states]
        expected = [sum(_state_sizes(spec)[:i]) for i in range(len(spec.shapes))]
        if len(strides) != 1 or offsets != expected:
            raise ValueError(
                f"its states lie at bytes {offsets} of a page, {[*strides]} apart; "
                f"its spec puts them at {expected}, {spec.page_size_bytes} apart. Bind "
                "the states in the order of the spec's shapes, from the page's base."
            )
        return strides.pop()

    def _kernel_pages(
        self, layer_name: str, kv_cache: torch.Tensor, k: int
    ) -> tuple[int | None, int, bool]:
        """Bytes between kernel pages, bytes that one spans, and whether densely.

        A single page has no stride.
        """
        if not isinstance(kv_cache, torch.Tensor) or kv_cache.device.type == "meta":
            where = getattr(kv_cache, "device", type(kv_cache).__name__)
            raise ValueError(
                f"its KV cache ({where}) has no storage to view. Bind a tensor that "
                "is allocated on a device."
            )
        itemsize = kv_cache.element_size()
        shape, strides = tuple(kv_cache.shape), tuple(kv_cache.stride())
        num_pages = self.num_blocks * k
        block_dim = _block_dim(shape, num_pages)
        inner = sorted(
            (stride, size)
            for dim, (stride, size) in enumerate(zip(strides, shape))
            if dim != block_dim and size != 1
        )
        if shape[:1] == (2,) and min(shape[:2]) >= num_pages:
            # Two pages, or K and V? Only a placement tells that pages come first.
            is_placed = self.placements.get(layer_name, _Placement()).offset is not None
            block_dim = block_dim if is_placed else None
        if block_dim is None or (
            num_pages > 1 and inner and inner[-1][0] > strides[block_dim]
        ):
            raise ValueError(
                f"the outermost dim in memory of its tensor (shape {shape}, strides "
                f"{strides}) is not that of {num_pages} kernel pages, so a page is no "
                "single byte range. Use an attention backend and a "
                "VLLM_KV_CACHE_LAYOUT that keep a block's heads, K and V together."
            )
        content, is_dense = 1, True
        for stride, size in inner:
            is_dense &= stride == content
            content += (size - 1) * stride
        page_stride = strides[block_dim] * itemsize if shape[block_dim] > 1 else None
        return page_stride, content * itemsize, is_dense

    def _logical_blocks(
        self,
        layer_name: str,
        spec: KVCacheSpec,
        kernel_block_size: int,
        block_stride: int | None,
        slots: int,
        bound: torch.Tensor,
    ) -> LogicalBlocks:
        """Check the pages against the KV cache config and the storage's end."""
        page = spec.page_size_bytes
        offset = int(bound.storage_offset()) * bound.element_size()
        placed = self.placements.get(layer_name, _Placement())
        placed_stride = page if placed.block_stride == 0 else placed.block_stride
        if block_stride is None:
            block_stride = placed_stride or page
        if placed_stride not in (None, block_stride) or (
            placed.offset not in (None, offset)
        ):
            raise ValueError(
                f"its pages start at byte {offset} and lie {block_stride} apart, the "
                f"KV cache config puts them at byte {placed.offset}, {placed_stride} "
                "apart. Bind the tensors that the config describes."
            )
        size = bound.untyped_storage().nbytes()
        if page > block_stride or (
            offset + (self.num_blocks - 1) * block_stride + page > size
        ):
            raise ValueError(
                f"{self.num_blocks} pages of {page} bytes, {block_stride} apart from "
                f"byte {offset} on, overlap or pass the end of its {size}-byte "
                "storage. Bind tensors of the KV cache config's num_blocks."
            )
        return LogicalBlocks(
            block_size=spec.block_size,
            kernel_block_size=kernel_block_size,
            num_blocks=self.num_blocks,
            page_size_bytes=page,
            block_stride_bytes=block_stride,
            slots_per_block=slots,
            page_offset_bytes=offset,
            bound=bound,
        )

    def _opaque_view(
        self, blocks: LogicalBlocks, planes: int, ndim: int
    ) -> tuple[torch.Tensor, LogicalBlocks]:
        """View whole pages as ``planes`` times the most equal slots that fit."""
        page, dtype = blocks.page_size_bytes, blocks.bound.dtype
        if page % dtype.itemsize:
            dtype = torch.uint8
        # Transfer kernels copy a slot by words, of two bytes at least.
        word = max(dtype.itemsize, 2 - page % 2)
        if page % (planes * word):
            planes, ndim = 1, 4
        slots = math.gcd(
            blocks.slots_per_block, blocks.block_size, page // (planes * word)
        )
        width = page // (planes * slots * dtype.itemsize)
        shape, stride = [slots, width], [width, 1]
        if ndim > 3:
            # The one head slot: inside the token slots, or around them.
            token_major = "NH" in self.kv_layout
            shape.insert(int(token_major), 1)
            stride.insert(int(token_major), width if token_major else slots * width)
        if planes > 1:
            shape.insert(0, planes)
            stride.insert(0, slots * width)
        shape.insert(0, blocks.num_blocks)
        stride.insert(0, blocks.block_stride_bytes // dtype.itemsize)
        return blocks.view(dtype, shape, stride), replace(blocks, slots_per_block=slots)


def _passes_through(group: KVCacheGroupSpec, spec: KVCacheSpec) -> bool:
    """Whether a connector transfers nothing of this layer."""
    return (
        isinstance(spec, EncoderOnlyAttentionSpec)
        or not getattr(spec, "prefix_cacheable", True)
        or not getattr(spec, "has_layer_views", True)
        or not getattr(group, "enable_kv_transfer", True)
        or getattr(group, "host_resident", False)
    )


def _state_sizes(spec: MambaSpec) -> list[int]:
    return [
        math.prod(shape) * dtype.itemsize
        for shape, dtype in zip(spec.shapes, spec.dtypes)
    ]


def _page_format(
    spec: KVCacheSpec,
    kv_cache: torch.Tensor | list[torch.Tensor],
    blocks: LogicalBlocks,
    backend: str,
) -> dict[str, Any]:
    """What decides the order of the bytes in a page of this layer."""
    tensors = [kv_cache] if isinstance(kv_cache, torch.Tensor) else kv_cache
    num_pages = blocks.num_blocks * blocks.blocks_per_kv_block
    return {
        "kind": type(spec).__name__,
        "block_size": blocks.block_size,
        "kernel_block_size": blocks.kernel_block_size,
        "page_size_bytes": blocks.page_size_bytes,
        "slots_per_block": blocks.slots_per_block,
        "bound": [[str(t.dtype), *_inner_dims(t, num_pages)] for t in tensors],
        "states": [
            [list(shape), str(dtype)]
            for shape, dtype in zip(
                getattr(spec, "shapes", ()), getattr(spec, "dtypes", ())
            )
        ],
        "quantization": getattr(getattr(spec, "kv_quant_mode", None), "name", ""),
        "cache_dtype": getattr(spec, "cache_dtype_str", None) or "",
        "backend": backend,
    }


def _block_dim(shape: Sequence[int], num_pages: int) -> int | None:
    """The dim of the kernel pages: the first, or the second behind K and V."""
    dims = (dim for dim, size in enumerate(shape[:2]) if size >= num_pages)
    return next(dims, None)


def _inner_dims(kv_cache: torch.Tensor, num_pages: int) -> list[list[int]]:
    """``[size, stride]`` of the dims within a kernel page, in the shape's order.

    The stride of a dim of size 1 says nothing and is 0.
    """
    block_dim = _block_dim(kv_cache.shape, num_pages)
    return [
        [size, stride if size > 1 else 0]
        for dim, (size, stride) in enumerate(zip(kv_cache.shape, kv_cache.stride()))
        if dim != block_dim
    ]
