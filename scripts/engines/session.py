"""Engines that are asked, and told other things, while they run.

::

    with session.host(folder / "engines.log") as host, host.engine(job) as engine:
        first, second = engine.ask([prompt, other_prompt])
        engine.call(reset, "argument")
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.engines import environment, server
from scripts.engines.engine import Answer, Job, Request

TIMEOUT = 300.0
"""Seconds for an engine to start, and for what it is asked at once."""
_END_TIMEOUT = 60.0


class Engine:
    """A running engine."""

    def __init__(self, host: "Host", job: Job, groups: list[dict[str, Any]]) -> None:
        self.job = job
        self.groups = groups
        """What the connector registered, per KV cache group."""
        self._host = host

    def ask(
        self,
        requests: Sequence[Request | list[int]],
        *,
        together: bool = False,
        max_tokens: int | None = None,
        timeout: float = TIMEOUT,
    ) -> list[Answer]:
        """Ask for each request, given as such or as token ids.

        Args:
            requests: Asked for one after the other.
            together: Ask for all at once instead.
            max_tokens: Tokens of each answer, if not as many as the job says.
            timeout: Seconds in all.

        Raises:
            server.StepFailed: if the engine ends or is late. What a request runs into
                is in its answer.

        """
        asked = [r if isinstance(r, Request) else Request(r) for r in requests]
        command = {
            "ask": [asdict(request) for request in asked],
            "together": together,
            "max_tokens": max_tokens,
        }
        result = self._host.command(self.job, command, timeout)
        return [Answer(**answer) for answer in result["answers"]]

    def call(
        self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT
    ) -> Any:
        """Call the function in the engine's process, with its ``LLM`` and ``args``.

        Args:
            function: Of a module that the engine's process can import.
            args: What JSON can hold; so must be what the function returns.
            timeout: Seconds.

        Raises:
            server.StepFailed: if it raises, or the engine ends or is late.

        """
        name = f"{function.__module__}:{function.__qualname__}"
        command = {"call": name, "args": args}
        result = self._host.command(self.job, command, timeout)
        if "error" in result:
            step = f"{name} in engine {self.job.name} ({result['error']})"
            raise server.StepFailed(step, self.log)
        return result["result"]

    @property
    def log(self) -> Path:
        return Path(self.job.log)


class Host:
    """A process that has imported vLLM and makes engines, one at a time.

    It starts with the first engine, and anew after an engine that had to be killed.
    """

    def __init__(self, log: Path, runner: str, env: Mapping[str, str]) -> None:
        self._log = log
        self._runner = runner
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._has_engine = False
        self._buffer = b""
        self._resources = ExitStack()

    @contextmanager
    def engine(self, job: Job, timeout: float = TIMEOUT) -> Iterator[Engine]:
        """Run the job's engine until the block ends.

        Raises:
            server.StepFailed: if it does not start within ``timeout`` seconds, or ends
                badly; names the engine and its log.

        """
        self._start()
        self._has_engine = True
        started = self.command(job, {"start": asdict(job)}, timeout)
        try:
            yield Engine(self, job, started["groups"])
        except Exception:
            with suppress(server.StepFailed):
                self._end(job)
            raise
        except BaseException:
            self.close()
            raise
        self._end(job)

    def command(
        self, job: Job, command: dict[str, Any], timeout: float
    ) -> dict[str, Any]:
        """Send a command to the job's engine; returns the result.

        Raises:
            server.StepFailed: if the engine is late, or ends without being told to.

        """
        try:
            result = self._exchange(command, timeout)
        except TimeoutError:
            self.close()
            step = f"engine {job.name} ({timeout:.0f} s without a result)"
            raise server.StepFailed(step, Path(job.log)) from None
        if "ended" in result:
            self._has_engine = False
            if result["ended"] or "end" not in command:
                raise server.StepFailed(f"engine {job.name}", Path(job.log))
        return result

    def _end(self, job: Job) -> None:
        if self._has_engine:
            self.command(job, {"end": True}, _END_TIMEOUT)
        if self._process is not None:
            # What the engine left, such as a server that it started.
            server.kill(server.session_members(self._process.pid))

    def _exchange(self, command: dict[str, Any], timeout: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        return json.loads(self._read_line(timeout))

    def close(self) -> None:
        """End the process and all that it started."""
        self._resources.close()
        self._process = None
        self._has_engine = False
        self._buffer = b""

    def _start(self) -> None:
        if self._process is not None:
            return
        out = self._resources.enter_context(self._log.open("ab"))
        self._process = self._resources.enter_context(
            server.ended_with_us(
                subprocess.Popen(
                    [sys.executable, "-m", "scripts.engines.engine", self._runner],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=out,
                    bufsize=0,
                    env={**server.engine_env(), **self._env},
                    cwd=environment.ROOT,
                    start_new_session=True,
                )
            )
        )

    def _read_line(self, timeout: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        out = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([out], [], [], left)[0]:
                raise TimeoutError
            if not (data := os.read(out, 1 << 16)):
                raise server.StepFailed("importing vLLM", self._log)
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


@contextmanager
def host(
    log: Path, runner: str = "v1", env: Mapping[str, str] | None = None
) -> Iterator[Host]:
    """A host, closed when the block ends.

    Args:
        log: Gets what it prints itself; each engine has its own.
        runner: Model runner of its engines, "v1" or "v2".
        env: Further environment variables of its engines.

    """
    host = Host(log, runner, env or {})
    try:
        yield host
    finally:
        host.close()
