"""Find what a test started, among all else on the machine.

Processes inherit their environment, so a mark there is on all that come of a command.
"""

import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

_VARIABLE = "LOGICAL_BLOCKS_TEST"


class Mark:
    def __init__(self) -> None:
        self._value = uuid.uuid4().hex
        self._seen: set[int] = set()

    @property
    def env(self) -> Mapping[str, str]:
        """What the environment of a command needs to have."""
        return {**os.environ, **self.variable}

    @property
    def variable(self) -> dict[str, str]:
        return {_VARIABLE: self._value}

    def running(self) -> list[str]:
        """The command lines of the marked processes."""
        lines = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_VARIABLE) == self._value:
                    self._seen.add(process.pid)
                    lines.append(" ".join(process.cmdline()))
        return lines

    def shared_memory(self) -> list[str]:
        """Shared memory of the processes that ``running`` has ever seen."""
        names = [path.name for path in Path("/dev/shm").glob("lmcache_kv_*")]
        return [name for name in names if int(name.split("_")[2]) in self._seen]
