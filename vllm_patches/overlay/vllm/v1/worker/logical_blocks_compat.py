# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What logical_blocks.py asks of vLLM, under the names that each release has for it.

A new release adds a name here; the oldest release's end takes one away. Upstream,
each function is one attribute.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)


class Placement(NamedTuple):
    """Where the KV cache config puts a layer's pages, in bytes."""

    offset: int | None
    """Of page 0 in the allocation; None: the allocation is the layer's own."""
    block_stride: int
    """From one page to the next; 0: the page's size."""


def placements(kv_cache_config: KVCacheConfig) -> Mapping[str, Placement]:
    """Layer name -> its placement."""
    placed = {}
    tensors: list[Any] = kv_cache_config.kv_cache_tensors
    for tensor in tensors:
        if hasattr(tensor, "layers"):
            # vLLM 0.29 on: one allocation for all layers.
            for i, layer_name in enumerate(tensor.layers):
                offset = tensor.offset + i * tensor.layer_stride
                placed[layer_name] = Placement(offset, tensor.block_stride)
        else:
            # Up to vLLM 0.28: one allocation a tensor, unless layers are packed.
            offset = tensor.offset if tensor.block_stride else None
            placement = Placement(offset, tensor.block_stride)
            placed.update(dict.fromkeys(tensor.shared_by, placement))
    return placed


def num_states(spec: Any) -> int:
    """Slots that a page of this spec declares: its tokens unless it compresses them."""
    declared = getattr(spec, "num_states", None)  # vLLM 0.29 on
    return spec.storage_block_size if declared is None else declared


def unpadded_page_size_bytes(spec: AttentionSpec) -> int:
    """Bytes of a page without padding; up to 0.25 without the scales it may hold."""
    return getattr(spec, "unpadded_page_size_bytes", spec.real_page_size_bytes)


def layer_kernel_block_size(spec: KVCacheSpec, kernel_block_size: int) -> int:
    """Tokens per kernel page of one layer, where its spec overrides its group's."""
    storage_block_size = getattr(spec, "storage_block_size", None)
    if hasattr(spec, "tokens_per_state"):
        # vLLM 0.29 to 0.31: the layer's own kernel block size.
        return storage_block_size or kernel_block_size
    # Up to vLLM 0.28: slots. A compressed page is never split.
    is_compressed = storage_block_size != spec.block_size
    return spec.block_size if is_compressed else kernel_block_size


def is_transferred(group: KVCacheGroupSpec, spec: KVCacheSpec) -> bool:
    """Whether a connector transfers pages of this layer."""
    return (
        not isinstance(spec, EncoderOnlyAttentionSpec)
        and getattr(spec, "prefix_cacheable", True)
        and getattr(spec, "has_layer_views", True)
        and getattr(group, "enable_kv_transfer", True)
    )


def is_host_resident(group: KVCacheGroupSpec) -> bool:
    """Whether the group's pages lie in a pool of the host's (vLLM 0.30 on)."""
    return getattr(group, "host_resident", False)


def kernel_page_dims(
    backend: Any, spec: KVCacheSpec, kernel_block_size: int
) -> tuple[int, int]:
    """Which dim of the bound tensor is the kernel pages', and its planes.

    Up to vLLM 0.28 the attention backend says so; since then kernel pages come first
    and K and V lie side by side.
    """
    if not hasattr(backend, "get_kv_cache_block_dim") or not isinstance(
        spec, AttentionSpec
    ):
        return 0, 1
    count = 1234567
    shape = backend.get_kv_cache_shape(
        count, kernel_block_size, spec.num_kv_heads, spec.head_size
    )
    return shape.index(count), 2 if len(shape) == 5 else 1


def spec_facts(spec: Any) -> dict[str, Any]:
    """What of a spec decides which bytes a page holds, beside its sizes."""
    shapes, dtypes = getattr(spec, "shapes", ()), getattr(spec, "dtypes", ())
    windows = ("sliding_window", "attention_chunk_size", "rswa_window")
    return {
        "window": next(filter(None, (getattr(spec, w, None) for w in windows)), 0),
        "states": [[list(shape), str(dtype)] for shape, dtype in zip(shapes, dtypes)],
        "quantization": getattr(getattr(spec, "kv_quant_mode", None), "name", ""),
        "cache_dtype": getattr(spec, "cache_dtype_str", None) or "",
    }


def is_shuffled(backend: Any) -> bool:
    """Whether the backend shuffles a page's bytes for its kernels (ROCm's AITER)."""
    from vllm import envs

    return "AITER" in backend.get_name() and getattr(
        envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False
    )
