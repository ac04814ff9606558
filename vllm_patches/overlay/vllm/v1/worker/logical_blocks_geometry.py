# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How the pages of one kind of layer are viewed, or why they cannot be.

What is computed comes from the layer's spec, the kernel block size of its block table
and its attention backend; the bound tensor is only checked against it. A function that
refuses returns its reason instead.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, MambaSpec
from vllm.v1.worker import logical_blocks_compat as compat

_PAGE_SPLITTING_LAYOUTS = ("LHBNC", "BHLNC")
_REUSABLE_MAMBA_CACHE_MODES = ("align", "all")


class AttnBackend(NamedTuple):
    """What an attention group knows of the tensors that its layers bind."""

    name: str = ""
    """The backend, and what it adds to the order of the bytes in a page."""
    block_dim: int = 0
    """The dim of the bound tensor that counts kernel pages."""
    planes: int = 1
    """2 where K and V are a dim of their own."""


class Layer(NamedTuple):
    """One layer of a KV cache group, and what is known of its KV cache."""

    name: str
    group_id: int
    spec: Any
    kv_cache: Any
    kernel_block_size: int | None  # Its group's.
    placement: compat.Placement | None
    backend: AttnBackend
    is_host_resident: bool
    shows_padding: bool  # In its view.

    def __str__(self) -> str:
        kind = type(self.spec).__name__
        return f"group {self.group_id}, layer {self.name!r} ({kind})"


class Geometry(NamedTuple):
    """What layers of one spec, shape and stride have in common."""

    block_size: int
    kernel_block_size: int
    page_size: int
    stride: int  # From one page to the next, in bytes.
    slots: int
    view: tuple[torch.dtype, list[int], list[int]] | None
    """The view's dtype, and its dims and strides in elements; None for the bound
    tensor itself."""


class _KernelPages(NamedTuple):
    """How a bound tensor's kernel pages lie in memory, in bytes."""

    stride: int | None  # From one to the next; None for a single one.
    span: int  # From the first byte of one to the last.
    is_dense: bool  # Whether one has no bytes between its elements.


def bound_tensors(kv_cache: Any) -> Sequence[Any]:
    """The tensors bound for a layer: one, or a Mamba layer's states (up to 0.25)."""
    return kv_cache if isinstance(kv_cache, (list, tuple)) else (kv_cache,)


def elsewhere(at: int, apart: int, offset: int | None, stride: int) -> str:
    """Why pages are refused that the config puts elsewhere than the tensor has them."""
    return (
        f"its pages start at byte {at} and lie {apart} apart, the KV cache config puts "
        f"them at byte {at if offset is None else offset}, {stride} apart. Bind the "
        "tensors that the config describes."
    )


def kind_of(layer: Layer) -> Any:
    """Equal for layers that differ in nothing but their name and their place."""
    tensors = bound_tensors(layer.kv_cache)
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


def geometry_of(layer: Layer, num_blocks: int, kv_layout: str) -> Geometry | str:
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
    layer: Layer, num_blocks: int, kv_layout: str
) -> Geometry | str:
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
    shape = (kernel_pages.span * k, slots, planes, bound.ndim, kv_layout)
    return _view(layer, kernel_block_size, num_blocks, stride, *shape)


def _mamba_geometry(layer: Layer, num_blocks: int, kv_layout: str) -> Geometry | str:
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
    tensors = bound_tensors(bound)
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
    shape = (sum(sizes), tokens, planes, ndim, kv_layout)
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
    layer: Layer,
    kernel_block_size: int,
    num_blocks: int,
    bound_stride: int | None,
    content: int,
    slots: int,
    planes: int | None,
    ndim: int,
    kv_layout: str,
) -> Geometry | str:
    """The geometry of pages that lie ``bound_stride`` bytes apart in their tensor.

    Without planes the tensor stays as it is; with them, a page's content (bytes from
    its base, the rest is padding) is shown as so many times the most equal slots that
    add less than a hundredth to it. Two planes show the padding too, since connectors
    that parse them take pages to be dense (up to 0.25).
    """
    spec, bound = layer.spec, bound_tensors(layer.kv_cache)[0]
    page, tokens = spec.page_size_bytes, spec.block_size
    assert layer.placement is not None
    stride = layer.placement.block_stride or page
    if bound_stride not in (None, stride):
        at = bound.storage_offset() * bound.element_size()
        return elsewhere(at, bound_stride, layer.placement.offset, stride)
    if planes is None:
        return Geometry(tokens, kernel_block_size, page, stride, slots, None)
    dtype = torch.uint8 if page % bound.dtype.itemsize else bound.dtype
    # Transfer kernels copy a slot by words, of two bytes at least.
    word = max(dtype.itemsize, 2 - page % 2)
    content = page if planes > 1 or layer.shows_padding else content
    if page % (planes * word):
        planes, ndim = 1, 4
    most = math.gcd(slots, tokens)
    slots, size = _slots(content // planes, page // planes, most, word)
    dims = [slots, size // dtype.itemsize]
    if ndim > 3:
        dims.insert("NH" in kv_layout, 1)  # The one head, in or around its slots.
    if planes > 1:
        dims.insert(0, planes)
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    view = (dtype, [num_blocks, *dims], [stride // dtype.itemsize, *strides])
    return Geometry(tokens, kernel_block_size, page, stride, slots, view)


def _slots(content: int, page: int, most: int, word: int) -> tuple[int, int]:
    """How many equal slots cover the content, and the bytes of one, in whole words.

    The most, of the divisors of ``most``, that add less than a hundredth and stay in
    the page.
    """
    limit = min(page, -(-content // word) * word + content // 100)
    slots = next(
        n
        for n in range(most, 0, -1)
        if most % n == 0 and n * -(-content // (n * word)) * word <= limit
    )
    return slots, -(-content // (slots * word)) * word
