"""A real LMCache server, started and stopped without leaving anything behind."""

import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_patches.check import processes
from vllm_patches.check.processes import (
    SEPARATE,
    StepFailed,
    ended_with_us,
    free_ports,
    kill,
    private_env,
    session_members,
)

__all__ = [
    "CHUNK_SIZE",
    "SEPARATE",
    "Server",
    "StepFailed",
    "ended_with_us",
    "engine_env",
    "free_ports",
    "kill",
    "running",
    "session_members",
]

CHUNK_SIZE = 256
"""Tokens per LMCache chunk: one logical block of the tiny models."""


class Server(processes.Server):
    """A server that can be killed, emptied, and named in an engine's arguments."""

    def __init__(self, log: Path, timeout: float = 300) -> None:
        super().__init__(log, engine_env(), timeout)

    def restart(
        self, options: Sequence[str] = SEPARATE, chunk_size: int = CHUNK_SIZE
    ) -> None:
        """Kill it and start it, with an empty cache, on the same ports."""
        self.kill()
        self.start(options, chunk_size)

    def clear(self) -> None:
        """Drop all that it keeps."""
        url = f"http://127.0.0.1:{self.http_port}/cache/clear"
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60)

    def connector(self, name: str, **extra: object) -> dict[str, object]:
        """The ``--kv-transfer-config`` of an engine that uses this server."""
        return {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
                **extra,
            },
        }


@contextmanager
def running(
    log: Path,
    options: Sequence[str] = SEPARATE,
    timeout: float = 300,
    chunk_size: int = CHUNK_SIZE,
) -> Iterator[Server]:
    """Run ``lmcache server`` on free ports until the block ends.

    Raises:
        StepFailed: if it does not start within ``timeout`` seconds.

    """
    log.write_bytes(b"")
    lmcache = Server(log, timeout)
    try:
        lmcache.start(options, chunk_size)
        yield lmcache
    finally:
        lmcache.stop()


def engine_env() -> dict[str, str]:
    """The environment that engines and servers run in."""
    return private_env() | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM compiles some small functions even with enforce_eager: for tiny models
        # that takes longer than all they are asked.
        "TORCHDYNAMO_DISABLE": "1",
    }
