"""One memory for the model and LMCache, on the CPU.

LMCache moves a CPU tensor's storage into shared memory when it is registered, and
re-points only the tensors it was handed (lmcache/v1/platform/devices/cpu/shm.py). The
model's own tensors must follow.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lmcache.v1.platform.devices.cpu.shm import migrate_to_shm_and_wrap
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SharedMemoryPool(TorchFunctionMode):
    """Within it, ``torch.zeros`` of bytes allocates shared memory of LMCache's.

    vLLM allocates the KV cache inside ``get_mem_pool_context()`` as one int8 buffer
    (vllm/v1/worker/utils.py), so nothing is left to move or re-point later.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.zeros and out.dtype == torch.int8 and out.device.type == "cpu":
            migrate_to_shm_and_wrap(out)
        return out


def follow(
    vllm_config: "VllmConfig",
    bound: Mapping[str, Any],
    moved: Mapping[str, torch.Tensor],
) -> None:
    """Re-point the bound tensors whose storage LMCache moved at registration.

    Args:
        vllm_config: Names the layers, which hold tensors of their own.
        bound: Layer name -> KV cache as the worker bound it.
        moved: Layer name -> the tensor handed to LMCache.

    """
    layers = vllm_config.compilation_config.static_forward_context
    storages: dict[int, torch.UntypedStorage] = {}
    for name, kv_cache in bound.items():
        old, new = (
            next(_tensors(kv_cache)).untyped_storage(),
            moved[name].untyped_storage(),
        )
        if old.data_ptr() != new.data_ptr():
            storages[old.data_ptr()] = new
    held = [getattr(layer, "kv_cache", ()) for layer in layers.values()]
    for tensor in _tensors([*bound.values(), *held]):
        storage = storages.get(tensor.untyped_storage().data_ptr())
        if storage is not None:
            tensor.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _tensors(kv_cache: Any) -> Iterator[torch.Tensor]:
    if isinstance(kv_cache, torch.Tensor):
        yield kv_cache
    elif isinstance(kv_cache, (list, tuple)):
        for item in kv_cache:
            yield from _tensors(item)
