"""One memory for the model and LMCache, on the CPU.

LMCache moves a CPU tensor's storage into shared memory when it is registered, and
re-points only the tensors it was handed (lmcache/v1/platform/devices/cpu/shm.py). The
model's own tensors, and the addresses it took of them, would stay behind: so the KV
cache is allocated there from the start.
"""

from typing import Any

import torch
from lmcache.v1.platform.devices.cpu.shm import migrate_to_shm_and_wrap
from torch.overrides import TorchFunctionMode


class SharedMemoryPool(TorchFunctionMode):
    """Within it, ``torch.zeros`` of bytes allocates shared memory of LMCache's.

    vLLM allocates the KV cache inside ``get_mem_pool_context()`` as int8 buffers: one
    in all (vllm/v1/worker/utils.py), or several up to 0.28. None has to move later.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.zeros and out.dtype == torch.int8 and out.device.type == "cpu":
            migrate_to_shm_and_wrap(out)
        return out
