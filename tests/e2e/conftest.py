"""Real engines, real LMCache servers. A file's engines run one at a time."""

import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import pytest

from scripts.engines import environment, models, roundtrip, server, session
from scripts.engines.engine import Job

MODELS = environment.CACHE / "models"


@pytest.fixture(scope="session")
def hybrid() -> str:
    """Folder of the tiny model with Mamba layers."""
    return str(models.make("hybrid", MODELS))


@pytest.fixture(scope="session")
def plain() -> str:
    """Folder of the tiny model with attention layers only."""
    return str(models.make("plain", MODELS))


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[session.Host]:
    """Makes engines, of one thread each (tests/conftest.py)."""
    log = tmp_path_factory.mktemp("host") / "host.log"
    with session.host(log) as host:
        yield host


@pytest.fixture
def lmcache(tmp_path: Path) -> Iterator[server.Server]:
    """A server that keeps KV cache groups apart, by chunks of 256 tokens."""
    with server.running(tmp_path / "server.log") as lmcache:
        yield lmcache


def settled(
    disk: Path, more_than: Set[Path] = frozenset(), seconds: float = 3
) -> set[Path]:
    """LMCache's objects in a disk tier, once there are more and no new one for some
    seconds."""
    objects, since = set[Path](), time.monotonic()
    began = since
    while objects <= more_than or time.monotonic() - since < seconds:
        now = set(disk.rglob("*.data"))
        if now != objects:
            objects, since = now, time.monotonic()
        assert time.monotonic() - began < 60, "nothing reached the disk tier"
        time.sleep(0.2)
    return objects


def new_job(
    folder: Path, name: str, model: str, prompts: list[list[int]], **changes: Any
) -> Job:
    """A job with its log in the folder; changed engine arguments join the usual."""
    engine_args = {
        "block_size": roundtrip.BLOCK_SIZE,
        "num_gpu_blocks_override": 256,
    } | changes.pop("engine_args", {})
    defaults = dict(kernel_block_size=32, engine_args=engine_args)
    return Job(
        name=name,
        model=model,
        prompts=prompts,
        log=str(folder / f"{name}.log"),
        **{**defaults, **changes},
    )


@pytest.fixture
def make_job(tmp_path: Path):
    """Build a job with its log in the test's folder."""

    def make(name: str, model: str, prompts: list[list[int]], **changes: Any) -> Job:
        return new_job(tmp_path, name, model, prompts, **changes)

    return make


@pytest.fixture
def run(host: session.Host, make_job):
    """Start an engine for a model: ``with run("name", model, lmcache) as engine``.

    Without a server it has no connector; further arguments are the job's.
    """

    def run(
        name: str,
        model: str,
        lmcache: server.Server | None = None,
        extra: dict[str, Any] | None = None,
        timeout: float = session.TIMEOUT,
        **changes: Any,
    ):
        if lmcache is not None:
            changes["kv_transfer_config"] = lmcache.connector(
                "LMCacheLogicalConnector", **extra or {}
            )
        return host.engine(make_job(name, model, [], **changes), timeout)

    return run
