"""A real LMCache server, started and stopped without leaving anything behind."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

CHUNK_SIZE = 256
"""Tokens per LMCache chunk: one logical block of the tiny models."""
SEPARATE = ("--separate-object-groups",)
"""What a server of models with more than full attention needs."""

_SHARED_MEMORY = Path("/dev/shm")
# lmcache/v1/platform/devices/cpu/shm.py, CpuShmTensorWrapper.SHM_NAME_PREFIX
_SEGMENT_PREFIX = "lmcache_kv_"


class StepFailed(Exception):
    """A step failed; names the step and its log."""

    def __init__(self, step: str, log: Path | None = None) -> None:
        super().__init__(f"{step} failed" + (f"; its log is {log}" if log else ""))
        self.log = log


class Server:
    """An LMCache server, which can be killed and started again on its ports."""

    def __init__(self, log: Path, timeout: float = 120) -> None:
        self.port, self.http_port = free_ports(2)
        """Message port, for engines, and the one of its HTTP interface."""
        self._log = log
        self._timeout = timeout
        self._running = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, options: Sequence[str] = SEPARATE, chunk_size: int = CHUNK_SIZE
    ) -> None:
        """Start it and wait until it listens.

        Raises:
            StepFailed: if it does not within the timeout.

        """
        command = [sys.executable, "-m", "lmcache.cli.main", "server"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(self.http_port)]
        command += ["--chunk-size", str(chunk_size), "--l1-size-gb", "2"]
        command += ["--eviction-policy", "LRU", *options]
        out = self._running.enter_context(self._log.open("ab"))
        before = self._log.stat().st_size
        self._process = self._running.enter_context(
            ended_with_us(
                subprocess.Popen(
                    command,
                    stdout=out,
                    stderr=out,
                    env=engine_env(),
                    start_new_session=True,
                )
            )
        )
        deadline = time.monotonic() + self._timeout
        while b"Application startup complete" not in self._log.read_bytes()[before:]:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise StepFailed("starting the LMCache server", self._log)
            time.sleep(0.2)

    def stop(self) -> None:
        self._running.close()
        self._process = None

    def kill(self) -> None:
        """End it at once, as ``kill -9`` does."""
        assert self._process is not None
        self._process.kill()
        self.stop()

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

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

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
    timeout: float = 120,
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


@contextmanager
def ended_with_us(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """End the process and its session when the block ends, however it ends.

    The process leads the session, which also holds what its dead children left.
    """
    try:
        yield process
    finally:
        family = session_members(process.pid)
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        kill([*family, *session_members(process.pid)])
        remove_dead_segments({process.pid})


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill the processes, with the shared memory that they leave."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
    remove_dead_segments({process.pid for process in processes})


def session_members(leader: int) -> list[psutil.Process]:
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
        # vLLM compiles some small functions even with enforce_eager: for tiny models
        # that takes longer than all they are asked.
        "TORCHDYNAMO_DISABLE": "1",
    }
