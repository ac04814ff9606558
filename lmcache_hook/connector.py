"""``LMCacheLogicalConnector``: LMCache's connector, without guessing layouts."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from lmcache.integration.vllm.kv_cache_groups import create_engine_group_infos_from_vllm
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.mp_server_launcher import is_mp_server_autostart_enabled
from lmcache.integration.vllm.utils import vllm_layout_hints
from lmcache.logging import init_logger
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.platforms import current_platform

from lmcache_hook import cpu_memory, group_check, namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request
    from vllm.v1.worker.logical_blocks import LogicalKVCaches


logger = init_logger(__name__)


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
        from vllm.v1.worker import logical_blocks

        namespace.check_contract(logical_blocks.CONTRACT_VERSION)
        assert vllm_config.kv_transfer_config is not None
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        if current_platform.is_cpu():
            # Engine-driven transfer, LMCache's default there, takes one group only.
            extra_config.setdefault("lmcache.mp.mp_transfer_mode", "lmcache_driven")
        if is_mp_server_autostart_enabled(extra_config):
            arguments = extra_config.get("lmcache.mp.autostart.server_args", "")
            extra_config["lmcache.mp.autostart.server_args"] = (
                f"{arguments} --separate-object-groups"
            )
        super().__init__(vllm_config, role, kv_cache_config)
        self.fingerprint: str | None = None

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
        self.fingerprint = kv_caches.fingerprint
        self._enter_namespace(self.worker_adapter)
        logger.info(
            "KV cache fingerprint %s %s",
            self.fingerprint,
            json.dumps(
                {"contract": namespace.CONTRACT_VERSION, "groups": kv_caches.byte_order}
            ),
        )
        views = dict(kv_caches.items())
        addresses = [view.data_ptr() for view in views.values()]
        layout_hints = vllm_layout_hints(self._vllm_config)
        engine_group_infos = create_engine_group_infos_from_vllm(
            self._kv_cache_config, views, layout_hints, self._dcp_size
        )
        self.worker_adapter.register_kv_caches(views, engine_group_infos, layout_hints)
        if addresses != [view.data_ptr() for view in views.values()]:
            raise RuntimeError(
                "LMCache moved the KV cache away from the model: it was not allocated "
                "in this connector's memory pool (get_mem_pool_context)."
            )
        if self._kv_cache_config.has_mamba_layers:
            group_check.store_sample(self.worker_adapter, self._engine_id)

    def get_handshake_metadata(self) -> namespace.Fingerprint:
        """What the scheduler must know before its first lookup."""
        assert self.fingerprint is not None
        return namespace.Fingerprint(self.fingerprint, namespace.CONTRACT_VERSION)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], Any]
    ) -> None:
        self.set_xfer_handshake_metadata(metadata)

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Take over the workers' fingerprint, and check the server's set-up.

        Raises:
            ValueError: if the workers' pages differ, or the LMCache server would mix
                up the states of a model with Mamba layers.

        """
        self.fingerprint = namespace.agree(metadata)
        self._enter_namespace(self.scheduler_adapter)
        if self._kv_cache_config.has_mamba_layers:
            group_check.check_stored(self.scheduler_adapter, self._engine_id)

    def _get_or_create_request_tracker(self, request: "Request") -> Any:
        if self.fingerprint is None:
            raise RuntimeError(
                "LMCacheLogicalConnector's scheduler was never told the workers' "
                "fingerprint, so it cannot look anything up: this executor passes no "
                "connector handshake metadata. Use the mp or uni executor."
            )
        return super()._get_or_create_request_tracker(request)

    def _enter_namespace(self, adapter: Any) -> None:
        assert self.fingerprint is not None
        adapter.model_name = namespace.extend(
            adapter.model_name,
            self.fingerprint,
            self._vllm_config.cache_config.cache_dtype,
        )

    @property
    def _engine_id(self) -> str:
        return self._vllm_config.kv_transfer_config.engine_id

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        raise RuntimeError(
            "LMCacheLogicalConnector registers logical-block views only; this vLLM's "
            "worker handed over kernel-paged tensors: run `vllm-patches apply`."
        )
