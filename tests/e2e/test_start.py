"""What cannot work is refused as the engine starts, in seconds, with the way out."""

import time

import pytest

from scripts.engines import environment, models, roundtrip, server
from tests.e2e.conftest import MODELS
from tests.e2e.inside import reset_prefix_cache, views_alive
from tests.e2e.marks import Mark

PROMPT = roundtrip.prompts((1300,), seed=31)[0]
START = 90.0
"""Seconds that an engine may take to refuse; most of them are its own start."""


def refusal(run, *args, **kwargs) -> str:
    """Why the engine does not start, as its log has it; it must say so in time."""
    began = time.monotonic()
    with (
        pytest.raises(server.StepFailed) as refused,
        run(*args, timeout=START, **kwargs),
    ):
        pass
    assert time.monotonic() - began < START, "it hung"
    assert refused.value.log is not None
    _, _, reason = refused.value.log.read_text().partition("ValueError: ")
    return reason


@pytest.mark.parametrize("family", ["hybrid", "gemma3", "gpt-oss", "olmo3", "llama4"])
def test_server_that_mixes_groups(run, mixing: server.Server, family: str) -> None:
    """Windows and chunked-local attention have null blocks, as Mamba has."""
    model = str(models.make(family, MODELS))
    engine_args = {"block_size": 256}
    if family != "hybrid":
        engine_args = {"block_size": 32, "num_gpu_blocks_override": 512}
    reason = refusal(run, family, model, mixing, engine_args=engine_args)
    assert "lmcache server --chunk-size 256 --separate-object-groups" in reason


@pytest.fixture(scope="module")
def lmcache(tmp_path_factory: pytest.TempPathFactory):
    """A server that keeps groups apart, shared by models that share nothing."""
    log = tmp_path_factory.mktemp("separate") / "server.log"
    with server.running(log) as lmcache:
        yield lmcache


@pytest.fixture(scope="module")
def mixing(tmp_path_factory: pytest.TempPathFactory):
    """A server without ``--separate-object-groups``."""
    log = tmp_path_factory.mktemp("mixing") / "server.log"
    with server.running(log, options=()) as lmcache:
        yield lmcache


@pytest.mark.parametrize("block_size", [384, 544])
def test_block_that_does_not_divide_the_chunk(
    hybrid: str, run, lmcache: server.Server, block_size: int
) -> None:
    engine_args = {"block_size": block_size}
    reason = refusal(run, "refused", hybrid, lmcache, engine_args=engine_args)
    command = f"lmcache server --chunk-size {block_size} --separate-object-groups"
    assert command in reason


def test_autostarted_server_has_the_right_chunk(hybrid: str, run) -> None:
    port, http_port = server.free_ports(2)
    transfer = {
        "kv_connector": "LMCacheLogicalConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.autostart": True,
            "lmcache.mp.autostart.server_args": (
                f"--http-port {http_port} --l1-size-gb 1 --eviction-policy LRU"
            ),
        },
    }
    mark = Mark()
    changes = {"engine_args": {"block_size": 544}, "env": mark.variable}
    with run("auto", hybrid, kv_transfer_config=transfer, **changes) as engine:
        (first,) = engine.ask([PROMPT])
        assert any("lmcache" in command for command in mark.running())
        assert engine.call(reset_prefix_cache)
        (second,) = engine.ask([PROMPT])
    assert not mark.running(), "the server ends with its engine"
    with run("reference", hybrid, **changes) as engine:
        (reference,) = engine.ask([PROMPT])
    assert [first.cached_tokens, second.cached_tokens] == [0, 1088]
    assert roundtrip.difference(first, reference) == 0.0
    assert roundtrip.difference(second, reference) == 0.0


@pytest.mark.parametrize("family, block_size", [("gpt-oss", 256), ("gemma3", 128)])
def test_window_smaller_than_a_block(
    run, lmcache: server.Server, family: str, block_size: int
) -> None:
    """Served: LMCache takes windows of whole blocks, which keep what is needed."""
    model = str(models.make(family, MODELS))
    changes = {"engine_args": {"block_size": block_size}}
    with run("stores", model, lmcache, timeout=START, **changes) as engine:
        (stored,) = engine.ask([PROMPT])
    with run("retrieves", model, lmcache, timeout=START, **changes) as engine:
        (retrieved,) = engine.ask([PROMPT])
    with run("reference", model, **changes) as engine:
        (reference,) = engine.ask([PROMPT])
    assert [stored.cached_tokens, retrieved.cached_tokens] == [0, 1280]
    assert roundtrip.difference(stored, reference) == 0.0
    assert roundtrip.difference(retrieved, reference) == 0.0


def test_backend_that_cannot_read_a_cached_prefix(run, lmcache: server.Server) -> None:
    """vLLM turns its own prefix cache off for MLA on the CPU, but where it has AMX."""
    model = str(models.make("deepseek", MODELS))
    engine_args = {"attention_backend": "CPU_MLA", "num_gpu_blocks_override": 1024}
    reason = refusal(run, "mla", model, lmcache, engine_args=engine_args)
    assert "prefix" in reason


def test_prefix_cache_that_a_person_turned_off(
    plain: str, run, lmcache: server.Server
) -> None:
    """Not refused: the backend can read a prefix, and gets LMCache's."""
    changes = {"engine_args": {"enable_prefix_caching": False}}
    with run("off", plain, lmcache, **changes) as engine:
        first, second = engine.ask([PROMPT, PROMPT])
    with run("reference", plain, **changes) as engine:
        (reference,) = engine.ask([PROMPT])
    assert [first.cached_tokens, second.cached_tokens] == [0, 1280]
    assert roundtrip.difference(first, reference) == 0.0
    assert roundtrip.difference(second, reference) == 0.0


def test_engine_without_a_connector_says_and_builds_nothing(hybrid: str, run) -> None:
    with run("bare", hybrid) as engine:
        engine.ask([PROMPT])
        assert engine.call(views_alive) == 0
        log = engine.log.read_text().replace(str(environment.ROOT), "").lower()
    assert "logical" not in log
    assert "fingerprint" not in log
    assert "lmcache" not in log
