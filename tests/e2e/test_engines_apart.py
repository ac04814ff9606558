"""Engines that hold other values under one model path never see each other's entries.

tests/e2e/test_fingerprint.py has those that order a page's bytes differently.
"""

from pathlib import Path
from typing import Any

import pytest

from scripts.engines import models, roundtrip, server, session
from scripts.engines.engine import Answer
from tests.e2e.conftest import MODELS, new_job

PROMPTS = roundtrip.prompts((1300, 600), seed=11)
CACHED = [1280, 512]


def variants() -> dict[str, dict[str, Any]]:
    """Engine arguments of engines at one model path."""
    draft = {
        "method": "draft_model",
        "model": str(models.make_draft(MODELS)),
        "num_speculative_tokens": 2,
    }
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    return {
        "base": {},
        "rope": {"hf_overrides": {"rope_parameters": rope}},
        "draft": {"speculative_config": draft},
    }


@pytest.fixture(scope="module")
def answers(
    host: session.Host, plain: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], list[Answer]]:
    """Each variant's answers: beside the base's entries, to its own, and alone.

    One server, never emptied.
    """
    folder = tmp_path_factory.mktemp("apart")
    answers = {}
    with server.running(folder / "server.log") as lmcache:
        transfer = lmcache.connector("LMCacheLogicalConnector")
        for variant, engine_args in variants().items():
            for turn, config in (
                ("stores", transfer),
                ("retrieves", transfer),
                ("reference", None),
            ):
                job = new_job(
                    folder,
                    f"{variant}-{turn}",
                    plain,
                    [],
                    engine_args=engine_args,
                    kv_transfer_config=config,
                )
                with host.engine(job) as engine:
                    answers[variant, turn] = engine.ask(PROMPTS)
    return answers


@pytest.mark.parametrize("variant", ["base", "rope", "draft"])
def test_own_entries_only(answers, variant: str) -> None:
    stored, retrieved, reference = (
        answers[variant, turn] for turn in ("stores", "retrieves", "reference")
    )
    assert [answer.error for answer in stored + retrieved] == [None] * 4
    assert [answer.cached_tokens for answer in stored] == [0, 0]
    assert [answer.cached_tokens for answer in retrieved] == CACHED
    for answer, wanted in zip(stored + retrieved, reference * 2, strict=True):
        assert roundtrip.difference(answer, wanted) == 0.0


def test_the_rope_changes_answers(answers) -> None:
    """Or nothing here would show a hit of another's entries."""
    base, rope = (answers[variant, "reference"] for variant in ("base", "rope"))
    assert all(roundtrip.difference(a, b) > 0.1 for a, b in zip(base, rope))


def test_path_of_122_characters(
    plain: str, lmcache: server.Server, run, tmp_path: Path
) -> None:
    """As a snapshot of the Hugging Face hub has it; LMCache spells out its slashes."""
    folder = tmp_path / "hub" / "models--a--b" / "snapshots"
    folder.mkdir(parents=True)
    path = folder / ("c" * (121 - len(str(folder))))
    assert len(str(path)) == 122
    path.symlink_to(plain)
    with run("stores", str(path), lmcache) as engine:
        (stored,) = engine.ask(PROMPTS[:1])
    with run("retrieves", str(path), lmcache) as engine:
        (retrieved,) = engine.ask(PROMPTS[:1])
    assert retrieved.cached_tokens == CACHED[0]
    assert roundtrip.difference(retrieved, stored) == 0.0
