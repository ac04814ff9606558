"""What tests do inside an engine's process (``Engine.call``)."""

import gc
import os
import signal
import time
from typing import Any


def reset_prefix_cache(llm: Any) -> bool:
    """Empty vLLM's own prefix cache, once stores in flight have let go of it."""
    return settled(llm) and llm.reset_prefix_cache()


def settled(llm: Any, timeout: float = 60) -> bool:
    """Wait until no store in flight holds a block; whether that came to be."""
    pool = _core(llm).scheduler.kv_cache_manager.block_pool
    deadline = time.monotonic() + timeout
    # The null block is never free.
    while pool.get_num_free_blocks() < pool.num_gpu_blocks - 1:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        # A step without requests takes in what the connector's worker has finished.
        _core(llm).step_fn()
    return True


def kill_at_next_hit(llm: Any, pid: int) -> None:
    """Kill the process as soon as the scheduler is told of a hit in LMCache."""
    connector = _core(llm).scheduler.connector
    told = connector.get_num_new_matched_tokens

    def get_num_new_matched_tokens(*args: Any) -> Any:
        result = told(*args)
        if result[0]:
            connector.get_num_new_matched_tokens = told
            os.kill(pid, signal.SIGKILL)
        return result

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens


def mapped_mib(llm: Any) -> int:
    """MiB of address space of the engine's process."""
    return _mapped_mib()


def mapped_mib_after_shutdown(llm: Any) -> int:
    """MiB of address space that stay mapped once the engine is shut down."""
    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    return _mapped_mib()


def views_alive(llm: Any) -> int:
    """How many layers' views there are in the engine's process."""
    from vllm.v1.worker.logical_blocks import LogicalBlocks

    gc.collect()
    return sum(isinstance(thing, LogicalBlocks) for thing in gc.get_objects())


def _mapped_mib() -> int:
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmSize:"))
    return int(line.split()[1]) // 1024


def _core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core
