"""Both roles of the connector on a real LMCache server, without an engine.

vLLM's requests, its planned and allocated KV cache.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request
from vllm.v1.worker.logical_blocks import LogicalKVCaches
from vllm.v1.worker.utils import allocate_kv_cache

from lmcache_hook import cpu_memory
from scripts.engines import server
from tests.unit.hook import engines
from tests.unit.overlay import pools
from vllm_patches.check import roles

BLOCK, CHUNK, CHUNKS = 32, 256, 3
TOKENS = list(range(CHUNK * CHUNKS + 17))


class Connectors(NamedTuple):
    scheduler: Any
    worker: Any
    caches: LogicalKVCaches

    @property
    def both(self) -> roles.Roles:
        return roles.Roles(self.scheduler, self.worker)


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
        both = roles.Roles.make(config, plan)
        both.register(caches)
        yield Connectors(both.scheduler, both.worker, caches)
        both.shutdown()


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
    return roles.request(TOKENS, **changes)


def lookup(connectors: Connectors, asked: Request) -> int:
    """Tokens that LMCache has for the request."""
    return connectors.both.lookup(asked)


def store(connectors: Connectors, computed: Request, first_block: int = 1) -> None:
    """Schedule the request in one step, as vLLM does, and save it."""
    connectors.both.store(computed, block_ids(first_block))


def settle(connectors: Connectors) -> None:
    """Wait until lookups find all that was stored.

    LMCache answers a store before its lookups find it, and completes stores in order
    (lmcache/v1/multiprocess/native_completion.py): one more is stored and waited for.
    """
    last = {"cache_salt": uuid.uuid4().hex}
    store(connectors, request(**last))
    found = CHUNK * CHUNKS
    roles.wait(lambda: lookup(connectors, request(**last)) == found or None)


def load(connectors: Connectors, asked: Request, first_block: int) -> int:
    """Load what LMCache has of the request; returns its tokens."""
    return connectors.both.load(asked, block_ids(first_block))


def block_ids(first_block: int) -> list[list[int]]:
    return [[first_block + i for i in range(-(-len(TOKENS) // BLOCK))]]
