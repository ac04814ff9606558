"""A chunk is stored only if every block that a group keeps of it is real.

vLLM leaves the null block where a group has no use for a block: before the last state
of a step (Mamba in "align" mode), before the window, before the chunk (chunked-local).
"""

import pytest

from scripts.engines import models, roundtrip, server
from scripts.engines.engine import Answer
from tests.e2e.conftest import MODELS
from tests.e2e.inside import settled

ONE_STEP = {"max_num_batched_tokens": 4096}
# Of the second, one step leaves a state where chunks of 2 and of 3 blocks end.
LONG, REAL = roundtrip.prompts((2100, 1550), seed=21)


def assert_exact(answers: list[Answer], references: list[Answer]) -> None:
    """Cached or computed: on one thread both are the same."""
    seen = [
        (answer.cached_tokens, roundtrip.difference(answer, reference))
        for answer, reference in zip(answers, references, strict=True)
    ]
    assert [difference for _, difference in seen] == [0.0] * len(seen), seen


@pytest.mark.parametrize("blocks", [2, 3])
def test_chunks_of_several_mamba_blocks(
    hybrid: str, run, tmp_path, blocks: int
) -> None:
    """A step that starts after the first block leaves no state at that chunk's end."""
    asked = [LONG[:700], LONG[:1600], LONG, REAL]
    log = tmp_path / "server.log"
    with server.running(log, chunk_size=256 * blocks) as lmcache:
        with run("stores", hybrid, lmcache, engine_args=ONE_STEP) as engine:
            stored = engine.ask([LONG[:300], LONG, REAL])
        with run("retrieves", hybrid, lmcache, engine_args=ONE_STEP) as engine:
            retrieved = engine.ask(asked)
    with run("reference", hybrid, engine_args=ONE_STEP) as engine:
        reference = engine.ask(asked)
    assert_exact([*retrieved, stored[1]], [*reference, reference[2]])
    assert retrieved[3].cached_tokens == 1536, "what is real is served"


@pytest.fixture(scope="module")
def lmcache(tmp_path_factory: pytest.TempPathFactory):
    """One for all families, which share nothing."""
    log = tmp_path_factory.mktemp("stored") / "server.log"
    with server.running(log) as lmcache:
        yield lmcache


@pytest.mark.parametrize("family", ["gemma3", "olmo3", "llama4"])
def test_window_blocks_that_vllm_let_go_of(
    run, lmcache: server.Server, family: str
) -> None:
    """A prefix in vLLM's own cache has null blocks before its window.

    LMCache, emptied in between, is offered that prefix as if it were whole.
    """
    model = str(models.make(family, MODELS))
    engine_args = {"block_size": 32, "num_gpu_blocks_override": 512} | ONE_STEP
    asked = [LONG[:n] for n in (600, 800, 1100, 1400)]
    with run("stores", model, lmcache, engine_args=engine_args) as engine:
        engine.ask([LONG[:1070]])
        assert engine.call(settled)
        lmcache.clear()
        stored = engine.ask([LONG[:1400]])
    with run("retrieves", model, lmcache, engine_args=engine_args) as engine:
        retrieved = engine.ask(asked)
    with run("reference", model, engine_args=engine_args) as engine:
        reference = engine.ask(asked)
    assert stored[0].cached_tokens >= 1024, "the prefix was in vLLM's own cache"
    assert_exact([*retrieved, *stored], [*reference, reference[3]])
    assert retrieved[3].cached_tokens >= 1024, "what is real is served"
