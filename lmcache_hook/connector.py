"""``LMCacheLogicalConnector``: LMCache's connector, without guessing layouts."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from lmcache.integration.vllm.kv_cache_groups import create_engine_group_infos_from_vllm
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.utils import vllm_layout_hints
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.platforms import current_platform

from lmcache_hook import cpu_memory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.logical_blocks import LogicalKVCaches


class LMCacheLogicalConnector(LMCacheMPConnector):
    """Registers the views that a patched vLLM hands over, exactly as handed over.

    Takes the extra config of ``LMCacheMPConnector``
    (lmcache/integration/vllm/lmcache_mp_connector.py).
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        """Raises:
        RuntimeError: if this vLLM does not hand over logical-block views.

        """
        if not hasattr(KVConnectorBase_V1, "register_logical_kv_caches"):
            raise RuntimeError(
                "LMCacheLogicalConnector needs a vLLM that hands over logical-block "
                "views: run `vllm-patches apply` in this environment."
            )
        if current_platform.is_cpu():
            # Engine-driven transfer, LMCache's default there, takes one group only.
            vllm_config.kv_transfer_config.kv_connector_extra_config.setdefault(
                "lmcache.mp.mp_transfer_mode", "lmcache_driven"
            )
        super().__init__(vllm_config, role, kv_cache_config)

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        if current_platform.is_cpu():
            return cpu_memory.SharedMemoryPool()
        return super().get_mem_pool_context()

    def register_logical_kv_caches(self, kv_caches: "LogicalKVCaches") -> None:
        """Raises:
        ValueError: if a layer cannot be addressed by block ids, or LMCache does not
            take the views.

        """
        self.logical_kv_caches = kv_caches
        views = dict(kv_caches.items())
        if current_platform.is_cpu():
            # LMCache moves the tensors it is handed: give it aliases of them.
            views = {name: view.detach() for name, view in views.items()}
        layout_hints = vllm_layout_hints(self._vllm_config)
        engine_group_infos = create_engine_group_infos_from_vllm(
            self._kv_cache_config, views, layout_hints, self._dcp_size
        )
        self.worker_adapter.register_kv_caches(views, engine_group_infos, layout_hints)
        if current_platform.is_cpu():
            cpu_memory.follow(self._vllm_config, kv_caches.raw, views)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        raise RuntimeError(
            "LMCacheLogicalConnector registers logical-block views only; this vLLM's "
            "worker handed over kernel-paged tensors: run `vllm-patches apply`."
        )
