"""Both roles of the connector on an LMCache server, without an engine.

What a step of vLLM's scheduler and of its workers calls is called here.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from lmcache_hook.connector import LMCacheLogicalConnector

_TIMEOUT = 60.0
_ids = itertools.count()


class Roles:
    """A scheduler's connector and a worker's."""

    def __init__(self, scheduler: Any, worker: Any) -> None:
        self.scheduler = scheduler
        self.worker = worker

    @classmethod
    def make(cls, vllm_config: Any, kv_cache_config: Any) -> "Roles":
        roles = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
        return cls(
            *(LMCacheLogicalConnector(vllm_config, r, kv_cache_config) for r in roles)
        )

    def register(self, caches: Any) -> None:
        """Register the worker's ``LogicalKVCaches``, and tell the scheduler."""
        self.worker.register_logical_kv_caches(caches)
        metadata = {0: self.worker.get_handshake_metadata()}
        self.scheduler.set_xfer_handshake_metadata(metadata)

    def shutdown(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def lookup(self, asked: Request) -> int:
        """Tokens that LMCache has for the request."""
        return wait(lambda: self.scheduler.get_num_new_matched_tokens(asked, 0)[0])

    def store(self, computed: Request, block_ids: Sequence[list[int]]) -> None:
        """Schedule the request in one step, as vLLM does, and save it.

        Args:
            computed: Its pages are computed.
            block_ids: By KV cache group.

        """
        self.lookup(computed)
        self._allocate(computed, block_ids, 0)
        step = SchedulerOutput.make_empty()
        new: Any = SimpleNamespace(req_id=computed.request_id)
        step.scheduled_new_reqs = [new]
        step.num_scheduled_tokens = {computed.request_id: computed.num_tokens}
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(step))
        self.worker.wait_for_save()
        self._finish(0, {computed.request_id})
        self.scheduler.request_finished(computed, block_ids[0])

    def load(self, asked: Request, block_ids: Sequence[list[int]]) -> int:
        """Load what LMCache has of the request; returns its tokens."""
        tokens = self.lookup(asked)
        if tokens:
            self._allocate(asked, block_ids, tokens)
            step = SchedulerOutput.make_empty()
            metadata = self.scheduler.build_connector_meta(step)
            self.worker.bind_connector_metadata(metadata)
            self.worker.start_load_kv(None)
            self._finish(1, {asked.request_id})
        return tokens

    def _allocate(
        self, request: Request, block_ids: Sequence[list[int]], loaded: int
    ) -> None:
        blocks: Any = SimpleNamespace(get_block_ids=lambda: tuple(block_ids))
        self.scheduler.update_state_after_alloc(request, blocks, loaded)

    def _finish(self, what: int, request_ids: set[str]) -> None:
        """Wait for the requests' stores (0) or loads (1)."""
        done: set[str] = set()

        def finished() -> bool | None:
            done.update(self.worker.get_finished(request_ids)[what] or ())
            return request_ids <= done or None

        wait(finished)


def request(token_ids: Sequence[int], **changes: Any) -> Request:
    values: dict[str, Any] = {
        "request_id": f"request-{next(_ids)}",
        "prompt_token_ids": list(token_ids),
        "sampling_params": SamplingParams(max_tokens=1),
        "pooling_params": None,
    }
    return Request(**values | changes)


def wait(poll: Callable[[], Any]) -> Any:
    """The first result that is not None.

    Raises:
        TimeoutError: if there is none in a minute.

    """
    deadline = time.monotonic() + _TIMEOUT
    while (result := poll()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"LMCache has not answered for {_TIMEOUT:.0f} s")
        time.sleep(0.01)
    return result
