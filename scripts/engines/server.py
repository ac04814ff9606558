"""A real LMCache server, started and stopped without leaving anything behind."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

CHUNK_SIZE = 256
"""Tokens per LMCache chunk: one logical block of the tiny models."""

_SHARED_MEMORY = Path("/dev/shm")
# lmcache/v1/platform/devices/cpu/shm.py, CpuShmTensorWrapper.SHM_NAME_PREFIX
_SEGMENT_PREFIX = "lmcache_kv_"


class StepFailed(Exception):
    """A step of the round trip failed; names the step and its log."""

    def __init__(self, step: str, log: Path | None = None) -> None:
        super().__init__(f"{step} failed" + (f"; its log is {log}" if log else ""))


@dataclass(frozen=True)
class Server:
    port: int
    """Message port, for engines."""
    http_port: int
    process: psutil.Process

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
    options: Sequence[str] = ("--separate-object-groups",),
    timeout: float = 120,
) -> Iterator[Server]:
    """Run ``lmcache server`` on free ports until the block ends.

    Raises:
        StepFailed: if it does not start within ``timeout`` seconds.

    """
    port, http_port = free_ports(2)
    command = [sys.executable, "-m", "lmcache.cli.main", "server"]
    command += ["--host", "127.0.0.1"]
    command += ["--port", str(port), "--http-host", "127.0.0.1"]
    command += ["--http-port", str(http_port), "--chunk-size", str(CHUNK_SIZE)]
    command += ["--l1-size-gb", "2", "--eviction-policy", "LRU", *options]
    with (
        log.open("wb") as out,
        ended_with_us(_popen(command, stdout=out, stderr=out)) as process,
    ):
        deadline = time.monotonic() + timeout
        while b"Application startup complete" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise StepFailed("starting the LMCache server", log)
            time.sleep(0.2)
        yield Server(port, http_port, psutil.Process(process.pid))


def _popen(command: list[str], **kwargs: Any) -> subprocess.Popen:
    return subprocess.Popen(command, env=engine_env(), start_new_session=True, **kwargs)


@contextmanager
def ended_with_us(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """End the process and its session when the block ends, however it ends.

    The process leads the session, which also holds what its dead children left.
    """
    try:
        yield process
    finally:
        family = _session(process.pid)
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        family += _session(process.pid)
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)
        remove_dead_segments({process.pid, *(member.pid for member in family)})


def _session(leader: int) -> list[psutil.Process]:
    """The running processes of the session, all but its leader."""
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if process.pid != leader and os.getsid(process.pid) == leader:
                members.append(process)
    return members


def remove_dead_segments(pids: set[int]) -> None:
    """Remove the shared memory that killed engines could not free themselves."""
    for segment in _SHARED_MEMORY.glob(f"{_SEGMENT_PREFIX}*"):
        pid = int(segment.name.removeprefix(_SEGMENT_PREFIX).split("_")[0])
        if pid in pids and not psutil.pid_exists(pid):
            segment.unlink(missing_ok=True)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def engine_env() -> dict[str, str]:
    """The environment that engines and servers run in."""
    return os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "DO_NOT_TRACK": "1",
    }
