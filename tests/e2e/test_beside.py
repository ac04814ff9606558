"""Beside another connector of vLLM's, and in place of LMCache's own."""

from pathlib import Path
from typing import Any

import pytest

from scripts.engines import roundtrip, server, session
from scripts.engines.engine import Answer
from tests.e2e.conftest import new_job
from tests.e2e.inside import reset_prefix_cache

PROMPTS = roundtrip.prompts((1300, 600), seed=53)
CACHED = [1280, 512]
INJECTED = "Inject KV cache of"
"""What vLLM's ExampleConnector logs for each prompt that it loads."""
PAGED_ALIKE = {"kernel_block_size": 256}


@pytest.fixture(scope="module")
def reference(
    host: session.Host, plain: str, tmp_path_factory: pytest.TempPathFactory
) -> list[Answer]:
    folder = tmp_path_factory.mktemp("reference")
    with host.engine(new_job(folder, "reference", plain, [], **PAGED_ALIKE)) as engine:
        return engine.ask(PROMPTS)


def beside(lmcache: server.Server, folder: Path, lmcache_first: bool) -> dict[str, Any]:
    """The ``--kv-transfer-config`` of both connectors; the first one that has a
    prompt loads it."""
    own = lmcache.connector("LMCacheLogicalConnector")
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [own, example] if lmcache_first else [example, own]
        },
    }


def test_both_children_of_a_multi_connector_serve(
    plain: str,
    lmcache: server.Server,
    run,
    tmp_path: Path,
    reference: list[Answer],
) -> None:
    """Each stores what the engine computes, and answers the next engine alone."""
    shared = tmp_path / "shared"
    both = beside(lmcache, shared, lmcache_first=True)
    with run("stores", plain, kv_transfer_config=both, **PAGED_ALIKE) as engine:
        stored = engine.ask(PROMPTS)
    assert list(shared.rglob("*.safetensors")), "the other child has stored, too"
    nothing = beside(lmcache, tmp_path / "empty", lmcache_first=False)
    with run("lmcache", plain, kv_transfer_config=nothing, **PAGED_ALIKE) as engine:
        from_lmcache = engine.ask(PROMPTS)
        assert INJECTED not in engine.log.read_text()
    lmcache.clear()
    with run("example", plain, kv_transfer_config=both, **PAGED_ALIKE) as engine:
        from_example = engine.ask(PROMPTS)
        assert engine.log.read_text().count(INJECTED) == len(PROMPTS)
    assert [answer.cached_tokens for answer in stored] == [0, 0]
    for answers in (from_lmcache, from_example):
        assert [answer.cached_tokens for answer in answers] == CACHED
    for answer, wanted in zip(
        stored + from_lmcache + from_example, reference * 3, strict=True
    ):
        assert roundtrip.difference(answer, wanted) == 0.0


def test_handshake_of_another_child_is_refused(
    plain: str, lmcache: server.Server, run, tmp_path: Path
) -> None:
    """vLLM's MultiConnector passes on the first child's only."""
    both = beside(lmcache, tmp_path, lmcache_first=False)
    first = both["kv_connector_extra_config"]["connectors"][0]
    first["kv_connector"] = "HandshakeConnector"
    first["kv_connector_module_path"] = "tests.e2e.handshake"
    with (
        pytest.raises(server.StepFailed) as refused,
        run("refused", plain, kv_transfer_config=both, **PAGED_ALIKE),
    ):
        pass
    assert refused.value.log is not None
    reason = refused.value.log.read_text().partition("RuntimeError: ")[2]
    assert "brought Greeting instead of a fingerprint" in reason
    assert "without a second such connector" in reason


def test_as_lmcaches_own_connector_where_that_is_right(
    plain: str, lmcache: server.Server, run, reference: list[Answer]
) -> None:
    """Full attention, paged by the block: the same hits and answers."""
    stock = lmcache.connector(
        "LMCacheMPConnector", **{"lmcache.mp.mp_transfer_mode": "lmcache_driven"}
    )
    answers = {}
    for name, config in (
        ("stock", stock),
        ("logical", lmcache.connector("LMCacheLogicalConnector")),
    ):
        changes = {"kv_transfer_config": config, **PAGED_ALIKE}
        with run(name, plain, **changes) as engine:
            answers[name] = engine.ask(PROMPTS)
            assert engine.call(reset_prefix_cache)
            answers[name] += engine.ask(PROMPTS)
    for ours, theirs in zip(answers["logical"], answers["stock"], strict=True):
        assert ours.cached_tokens == theirs.cached_tokens
    assert [answer.cached_tokens for answer in answers["logical"]] == [0, 0, *CACHED]
    for connector in answers.values():
        for answer, wanted in zip(connector, reference * 2, strict=True):
            assert roundtrip.difference(answer, wanted) == 0.0
