"""``LMCacheLogicalConnector``: LMCache's connector, without guessing layouts."""

import functools
import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lmcache.integration.vllm.lmcache_mp_connector import (
    LMCacheMPConnector,
    get_group_tokens_per_block,
)
from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPRequestTracker,
    LMCacheMPWorkerMetadata,
)
from lmcache.integration.vllm.mp_server_launcher import is_mp_server_autostart_enabled
from lmcache.integration.vllm.utils import vllm_layout_hints
from lmcache.logging import init_logger
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.platforms import current_platform

from lmcache_hook import cpu_memory, namespace, request_key, server, stored

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request
    from vllm.v1.worker.logical_blocks import LogicalKVCaches


logger = init_logger(__name__)

_AUTOSTART_ARGS = "lmcache.mp.autostart.server_args"
_INTERMEDIATE = "lmcache.mp.transfer_intermediate_tensors"


class Tracker(LMCacheMPRequestTracker):
    """LMCache's record of a request, keyed and freed as vLLM's is."""

    key: request_key.RequestKey
    request: "Request"
    groups: tuple[list[Any], list[int]]
    """Specs and tokens per block id of the engine groups."""
    forgotten: dict[int, int]
    """Engine group id -> how many of its blocks were looked at for freed ones."""

    def get_token_ids(self) -> list[int]:
        return self.key.token_ids()

    def increase_num_scheduled_tokens(self, num_new_tokens: int) -> None:
        computed = self.request.num_computed_tokens
        stored.forget_freed(self, *self.groups, computed)
        super().increase_num_scheduled_tokens(num_new_tokens)


@dataclass
class WorkerMetadata(LMCacheMPWorkerMetadata):
    """What workers tell the scheduler after a step."""

    is_healthy: bool = True

    def aggregate(self, other: Any) -> "WorkerMetadata":
        both = super().aggregate(other)
        return WorkerMetadata(
            both.completed_store_requests,  # type: ignore[attr-defined]
            both.failed_store_requests,  # type: ignore[attr-defined]
            self.is_healthy and other.is_healthy,
        )


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
        ValueError: if LMCache cannot serve this engine, saying what to change.

        """
        if not hasattr(KVConnectorBase_V1, "register_logical_kv_caches"):
            raise RuntimeError(
                "LMCacheLogicalConnector needs a vLLM that hands over logical-block "
                "views: run `vllm-patches apply` in this environment."
            )
        from vllm.v1.worker import logical_blocks

        namespace.check_contract(logical_blocks.CONTRACT_VERSION)
        refuse(vllm_config)
        self._tokens_per_block = get_group_tokens_per_block(
            vllm_config, kv_cache_config
        )
        chunk = server.chunk_size(
            self._tokens_per_block, kv_cache_config.has_mamba_layers
        )
        _configure(vllm_config.kv_transfer_config, chunk)
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        except ValueError as e:
            raise ValueError(f"{e} Start `{server.command(chunk)}`.") from e
        self.fingerprint: str | None = None
        adapter = self._adapter
        self._specs = [stored.leaf_spec(g) for g in kv_cache_config.kv_cache_groups]
        self._kept = stored.kept(
            self._specs, self._tokens_per_block, adapter.lmcache_tokens_per_chunk
        )
        self._base_name = adapter.model_name
        self._adapters = request_key.Adapters()
        self._complaint = ""
        self._has_stored = self._is_asleep = False

    @property
    def _adapter(self) -> Any:
        is_worker = self.role == KVConnectorRole.WORKER
        return self.worker_adapter if is_worker else self.scheduler_adapter

    def _enter_namespace(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._adapter.model_name = namespace.name(self._base_name, fingerprint)
        logger.info("LMCache's model name is %s", self._adapter.model_name)

    # ==============================
    # Worker
    # ==============================

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        if current_platform.is_cpu():
            return cpu_memory.SharedMemoryPool()
        return super().get_mem_pool_context()

    def register_logical_kv_caches(self, kv_caches: "LogicalKVCaches") -> None:
        """Raises:
        ValueError: if a layer cannot be addressed by block ids, or LMCache does not
            take the views.

        """
        from vllm.v1.worker.logical_blocks import digest

        if current_platform.is_cpu():
            # Contiguous tensors only (lmcache/v1/platform/devices/cpu/shm.py).
            kv_caches = kv_caches.with_padding()
        self.logical_kv_caches = kv_caches
        adapter, views = self.worker_adapter, dict(kv_caches.items())
        strategy = adapter.parallel_strategy
        part = (strategy.kv_worker_id, kv_caches.document)
        parts = namespace.gather(part, self._vllm_config)
        document = namespace.document(self._vllm_config, strategy, parts)
        self._enter_namespace(digest(document))
        if strategy.vllm_worker_id == 0:
            text = json.dumps(document)
            logger.info("KV cache fingerprint %s %s", self.fingerprint, text)

        hints = vllm_layout_hints(self._vllm_config)
        infos = server.group_infos(
            self._vllm_config, self._kv_cache_config, views, hints, self._kept
        )
        server.check_views(views, infos, hints, adapter.lmcache_tokens_per_chunk)
        server.answer_refusals(adapter.req_client)
        addresses = [view.data_ptr() for view in views.values()]
        adapter.register_kv_caches(views, infos, hints)
        if addresses != [view.data_ptr() for view in views.values()]:
            raise RuntimeError(
                "LMCache moved the KV cache away from the model: it was not allocated "
                "in this connector's memory pool (get_mem_pool_context)."
            )
        # The heartbeat calls it when the server is back.
        again = functools.partial(self._recover, adapter._reregister_kv_caches_callback)
        adapter._reregister_kv_caches_callback = again
        server.store_sample(adapter, self._kept)

    def _recover(self, register: Any) -> bool:
        """Register anew, on a server that may be another one. Never raises."""
        adapter = self.worker_adapter
        is_first = adapter.parallel_strategy.vllm_worker_id == 0

        def check() -> None:
            server.store_sample(adapter, self._kept)
            server.check_sample(adapter, adapter.req_client, self._kept)

        log = logger.error if is_first else logger.debug
        return not self._is_asleep and register() and self._passes(check, log)

    def _passes(self, check: Any, log: Any) -> bool:
        """Whether a server that came back may be used; says why not, once."""
        try:
            check()
        except Exception as e:
            if str(e) != self._complaint:
                log("%s This engine goes on without LMCache.", e)
            self._complaint = str(e)
            return False
        self._complaint = ""
        return True

    def unregister_kv_caches(self) -> None:
        """Before sleep: the memory that the server maps goes."""
        self._is_asleep = True
        self.worker_adapter._health_event.clear()
        context = self.worker_adapter.transfer_ctx
        if context is not None and (future := context.unregister()) is not None:
            future.result(timeout=server.TIMEOUT)

    def restore_kv_caches(self) -> None:
        """After wake-up: the memory is another one; the next heartbeat registers it."""
        self._is_asleep = False
        self.worker_adapter._ensure_heartbeat_started()

    def wait_for_save(self) -> None:
        for request in self._get_connector_metadata().requests:
            if request.direction == "STORE":
                stored.null_unstorable(request.op.block_ids, self._kept)
        super().wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        adapter = self.worker_adapter
        retrieves = (future for future, _ in adapter.retrieve_futures.values())
        futures = [*adapter.store_futures.values(), *retrieves]
        refused = any(f.query() and not f.result(timeout=0) for f in futures)
        finished = super().get_finished(finished_req_ids)
        if refused:
            # A server that was started anew does not know this engine: the heartbeat
            # finds it well, registers and checks it.
            adapter._health_event.clear()
        return finished

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        own = super().build_connector_worker_meta()
        is_healthy = self.worker_adapter.is_healthy
        if own is None and is_healthy:
            return None
        stores = (
            (own.completed_store_requests, own.failed_store_requests) if own else ()
        )
        return WorkerMetadata(*stores or ({},), is_healthy=is_healthy)

    def get_handshake_metadata(self) -> namespace.Fingerprint:
        """What the scheduler must know before its first lookup."""
        assert self.fingerprint is not None
        return namespace.Fingerprint(self.fingerprint, namespace.CONTRACT_VERSION)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        raise RuntimeError(
            "LMCacheLogicalConnector registers logical-block views only; this vLLM's "
            "worker handed over kernel-paged tensors: run `vllm-patches apply`."
        )

    # ==============================
    # Scheduler
    # ==============================

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], Any]
    ) -> None:
        self.set_xfer_handshake_metadata(metadata)

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Take over the workers' fingerprint, and check the servers' set-up.

        Raises:
            ValueError: if the workers are not in one namespace, or a server would mix
                up KV cache groups.

        """
        fingerprint = namespace.agree(metadata)
        if fingerprint == self.fingerprint:
            return
        self._enter_namespace(fingerprint)
        adapter = self.scheduler_adapter
        adapter._ensure_heartbeat_started()
        for url, client in adapter.req_clients.items():
            check = functools.partial(server.check_sample, adapter, client, self._kept)
            check()
            # The workers say why a server that came back is not used.
            again = functools.partial(self._passes, check, logger.debug)
            adapter._heartbeats[url].register_recover_callback(again)

    def _get_or_create_request_tracker(self, request: "Request") -> Any:
        if self.fingerprint is None and not self._complaint:
            self._complaint = "no handshake"
            logger.error(
                "LMCache is not used: its scheduler side was never told the workers' "
                "fingerprint. This executor passes no connector handshake metadata; "
                "use the mp or uni executor."
            )
        tracker = super()._get_or_create_request_tracker(request)
        if not isinstance(tracker, Tracker):
            # LMCache makes it of its own class.
            tracker.__class__ = Tracker
            chunk = self.scheduler_adapter.lmcache_tokens_per_chunk
            tracker.request, tracker.forgotten = request, {}
            tracker.groups = (self._specs, self._tokens_per_block)
            tracker.key = request_key.RequestKey(request, chunk, self._adapters)
            tracker.key.is_known &= self.fingerprint is not None
            tracker.cache_salt = request_key.salt(request.cache_salt)
            if not tracker.key.is_known:
                tracker.max_offload_tokens = 0
        return tracker

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        for request in metadata.requests:
            if request.direction == "STORE":
                stored.null_checkpoints(
                    request.op,
                    self._specs,
                    self._tokens_per_block,
                    self._gpu_block_pool and self._gpu_block_pool.blocks,
                )
        if self._has_stored and any(k.window > 0 for k in self._kept):
            # Blocks that left a window may be another request's in this step, while
            # LMCache's server still reads them for the last step's stores.
            metadata.need_flush_before_forward = True
        self._has_stored = any(r.direction == "STORE" for r in metadata.requests)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata) and not metadata.is_healthy:
            for event in self.scheduler_adapter._health_events.values():
                event.clear()


def refuse(vllm_config: "VllmConfig") -> None:
    """Raises:
    ValueError: if this engine would get wrong answers, or hang.

    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    transfer: Any = vllm_config.kv_transfer_config
    sleeps = getattr(model, "enable_sleep_mode", False)
    if not (
        vllm_config.cache_config.enable_prefix_caching
        or vllm_config.scheduler_config.enable_chunked_prefill
    ):
        raise ValueError(
            "vLLM has turned prefix caching and chunked prefill off, as it does where "
            "the attention backend cannot read a cached prefix. Run this model without "
            "this KV connector, or turn --enable-chunked-prefill on if it was you."
        )
    executor = parallel.distributed_executor_backend
    if executor == "external_launcher" and parallel.world_size > 1:
        raise ValueError(
            "With the external_launcher executor every rank schedules by itself, and "
            "LMCache's answers reach them at different times. Use the mp executor."
        )
    if sleeps and not hasattr(KVConnectorBase_V1, "restore_kv_caches"):
        raise ValueError(
            "This vLLM does not tell connectors when it sleeps and unmaps the KV cache "
            "that LMCache reads. Use vLLM 0.33, or no --enable-sleep-mode."
        )
    if transfer.get_from_extra_config(_INTERMEDIATE, False):
        raise ValueError(
            f"{_INTERMEDIATE} does nothing under LMCacheLogicalConnector: use "
            "LMCacheMPConnector."
        )


def _configure(transfer: Any, chunk: int) -> None:
    """Defaults for what the operator left open; chunk in tokens."""
    extra = dict(transfer.kv_connector_extra_config)
    extra.setdefault("lmcache.mp.mq_timeout", server.TIMEOUT)
    if current_platform.is_cpu() and "LMCACHE_MP_TRANSFER_MODE" not in os.environ:
        # Engine-driven transfer, LMCache's default there, takes one group only.
        extra.setdefault("lmcache.mp.mp_transfer_mode", "lmcache_driven")
    if is_mp_server_autostart_enabled(extra):
        args = extra.get(_AUTOSTART_ARGS, "")
        for option in ("--separate-object-groups", f"--chunk-size {chunk}"):
            args += "" if option.split()[0] in args else f" {option}"
        extra[_AUTOSTART_ARGS] = args
    transfer.kv_connector_extra_config = extra
    # vLLM's default ends the engine at the request after a failed load.
    transfer.kv_load_failure_policy = "recompute"
