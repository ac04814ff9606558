"""Processes that end with us, and leave no child and no shared memory behind."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

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
    """An LMCache server on ports of its own, which can be started again on them."""

    def __init__(self, log: Path, env: Mapping[str, str], timeout: float = 300) -> None:
        self.port, self.http_port = free_ports(2)
        """Message port, for engines, and the one of its HTTP interface."""
        self._log = log
        self._env = env
        self._timeout = timeout
        self._running = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        options: Sequence[str] = SEPARATE,
        chunk_size: int = 256,
        l1_size_gb: int = 2,
    ) -> None:
        """Start it and wait until it listens.

        Raises:
            StepFailed: if it does not within the timeout.

        """
        arguments = ["server", "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--http-host", "127.0.0.1", "--http-port", str(self.http_port)]
        arguments += ["--chunk-size", str(chunk_size)]
        arguments += ["--l1-size-gb", str(l1_size_gb)]
        arguments += ["--eviction-policy", "LRU", *options]
        out = self._running.enter_context(self._log.open("ab"))
        before = self._log.stat().st_size
        self._process = self._running.enter_context(
            guarded("lmcache.cli.main", arguments, out.fileno(), self._env)
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

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid


@contextmanager
def guarded(
    module: str, arguments: Sequence[str], log: int, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m module`` in a session of its own, which ends with the block.

    It ends with this process too, even one that was killed (guard.py).

    Args:
        module: Run as ``__main__``.
        arguments: Its command line.
        log: File descriptor for all that it prints.
        env: Its environment.

    """
    command = [sys.executable, "-m", "vllm_patches.check.guard", module, *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=env,
        start_new_session=True,
    )
    try:
        with ended_with_us(process):
            yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()


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
    for pid, segments in shared_memory().items():
        if pid in pids and not psutil.pid_exists(pid):
            for segment in segments:
                segment.unlink(missing_ok=True)


def shared_memory() -> dict[int, list[Path]]:
    """Process id -> the shared memory of LMCache's that it made."""
    made: dict[int, list[Path]] = {}
    for segment in _SHARED_MEMORY.glob(f"{_SEGMENT_PREFIX}*"):
        pid = int(segment.name.removeprefix(_SEGMENT_PREFIX).split("_")[0])
        made.setdefault(pid, []).append(segment)
    return made


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def private_env() -> dict[str, str]:
    """The environment of servers and engines that nobody shall count."""
    return os.environ | {
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "DO_NOT_TRACK": "1",
    }
