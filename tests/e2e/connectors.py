"""Both roles of the connector on a real LMCache server, without an engine.

vLLM's requests, its planned and allocated KV cache; what a step of its scheduler and
of its workers calls is called here.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request
from vllm.v1.worker.logical_blocks import LogicalKVCaches
from vllm.v1.worker.utils import allocate_kv_cache

from lmcache_hook import cpu_memory
from lmcache_hook.connector import LMCacheLogicalConnector
from scripts.engines import server
from tests.unit.hook import engines
from tests.unit.overlay import pools

BLOCK, CHUNK, CHUNKS = 32, 256, 3
TOKENS = list(range(CHUNK * CHUNKS + 17))
_ids = itertools.count()


class Connectors(NamedTuple):
    scheduler: Any
    worker: Any
    caches: LogicalKVCaches


@contextmanager
def running(folder: Path) -> Iterator[Connectors]:
    """The scheduler's and the worker's, registered with a server of their own."""
    with server.running(folder / "server.log") as lmcache:
        extra = {"lmcache.mp.heartbeat_interval": 1}
        config = engines.configure(
            engines.save_config(folder / "model"),
            max_model_len=1024,
            kv_transfer_config=lmcache.connector("LMCacheLogicalConnector", **extra),
        )
        plan, caches = plan_and_allocate(config)
        roles = KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER
        worker, scheduler = (LMCacheLogicalConnector(config, r, plan) for r in roles)
        worker.register_logical_kv_caches(caches)
        metadata = {0: worker.get_handshake_metadata()}
        scheduler.set_xfer_handshake_metadata(metadata)
        yield Connectors(scheduler, worker, caches)
        worker.shutdown()
        scheduler.shutdown()


def plan_and_allocate(config: Any) -> tuple[Any, LogicalKVCaches]:
    config.cache_config.kv_cache_layout = "LBHNC"
    config.cache_config.num_gpu_blocks_override = 64
    layers: Any = {f"layers.{i}": pools.full(BLOCK) for i in range(2)}
    (plan,) = kv_cache_utils.get_kv_cache_configs(config, [layers], [1 << 30])
    with cpu_memory.SharedMemoryPool():
        cpu = torch.device("cpu")
        tensors = allocate_kv_cache(plan, cpu, KVCacheLayout["LBHNC"], [BLOCK])
    return plan, LogicalKVCaches(plan, tensors, [BLOCK], "LBHNC")


def request(**changes: Any) -> Request:
    values: dict[str, Any] = {
        "request_id": f"request-{next(_ids)}",
        "prompt_token_ids": TOKENS,
        "sampling_params": SamplingParams(max_tokens=1),
        "pooling_params": None,
    }
    return Request(**values | changes)


def wait(poll: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while (result := poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def lookup(connectors: Connectors, asked: Request) -> int:
    """Tokens that LMCache has for the request."""
    scheduler = connectors.scheduler
    return wait(lambda: scheduler.get_num_new_matched_tokens(asked, 0)[0])


def store(connectors: Connectors, computed: Request, first_block: int = 1) -> None:
    """Schedule the request in one step, as vLLM does, and save it."""
    scheduler, worker, _ = connectors
    lookup(connectors, computed)
    ids = allocate(connectors, computed, first_block, 0)
    step = SchedulerOutput.make_empty()
    new: Any = SimpleNamespace(req_id=computed.request_id)
    step.scheduled_new_reqs = [new]
    step.num_scheduled_tokens = {computed.request_id: len(TOKENS)}
    worker.bind_connector_metadata(scheduler.build_connector_meta(step))
    worker.wait_for_save()
    finish(worker, 0, {computed.request_id})
    scheduler.request_finished(computed, ids)


def settle(connectors: Connectors) -> None:
    """Wait until lookups find all that was stored.

    LMCache answers a store before its lookups find it, and completes stores in order
    (lmcache/v1/multiprocess/native_completion.py): one more is stored and waited for.
    """
    last = {"cache_salt": f"last of {next(_ids)}"}
    store(connectors, request(**last))
    wait(lambda: lookup(connectors, request(**last)) == CHUNK * CHUNKS or None)


def load(connectors: Connectors, asked: Request, first_block: int) -> int:
    """Load what LMCache has of the request; returns its tokens."""
    scheduler, worker, _ = connectors
    tokens = lookup(connectors, asked)
    if tokens:
        allocate(connectors, asked, first_block, tokens)
        step = SchedulerOutput.make_empty()
        worker.bind_connector_metadata(scheduler.build_connector_meta(step))
        worker.start_load_kv(None)
        finish(worker, 1, {asked.request_id})
    return tokens


def allocate(
    connectors: Connectors, request: Request, first_block: int, loaded: int
) -> list[int]:
    ids = [first_block + i for i in range(-(-len(TOKENS) // BLOCK))]
    blocks: Any = SimpleNamespace(get_block_ids=lambda: (ids,))
    connectors.scheduler.update_state_after_alloc(request, blocks, loaded)
    return ids


def finish(worker: Any, what: int, request_ids: set[str]) -> None:
    """Wait for the requests' stores (0) or loads (1)."""
    done: set[str] = set()

    def finished() -> bool | None:
        done.update(worker.get_finished(request_ids)[what] or ())
        return request_ids <= done or None

    wait(finished)
