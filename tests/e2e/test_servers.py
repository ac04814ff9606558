"""A running engine answers whatever becomes of its LMCache server."""

import time

import psutil
import pytest

from scripts.engines import roundtrip, server, session
from tests.e2e.conftest import new_job
from tests.e2e.inside import kill_at_next_hit, reset_prefix_cache

ONE_STEP = {"max_num_batched_tokens": 4096}
SOON = {"lmcache.mp.heartbeat_interval": 1}
IN_TIME = 60.0
"""Seconds for an answer whatever the server does; one that is well takes 1 or 2."""

PROMPTS = roundtrip.prompts((2100, 2101, 2102, 2103, 1300, 1310), seed=41)


@pytest.fixture(scope="module")
def reference(host: session.Host, hybrid: str, tmp_path_factory):
    """What an engine without a connector answers to a prompt, or a part of it."""
    folder = tmp_path_factory.mktemp("reference")
    job = new_job(folder, "reference", hybrid, [], engine_args=ONE_STEP)
    heads = [prompt[:600] for prompt in PROMPTS]
    with host.engine(job) as engine:
        answers = engine.ask([*PROMPTS, *heads])
    return dict(zip(map(tuple, [*PROMPTS, *heads]), answers))


@pytest.fixture
def check(reference):
    """Ask an engine and hold the answers against the reference; returns them."""

    def check(engine: session.Engine, prompts: list[list[int]]):
        answers = engine.ask(prompts, timeout=IN_TIME * len(prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            off = roundtrip.difference(answer, reference[tuple(prompt)])
            assert (answer.error, off) == (None, 0.0), answer.cached_tokens
        return answers

    return check


def hits_within(check, engine: session.Engine, prompt, seconds: float) -> bool:
    """Whether the prompt is served from LMCache at last, stored again each time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert engine.call(reset_prefix_cache)
        if check(engine, [prompt])[0].cached_tokens:
            return True
        time.sleep(1)
    return False


def errors(engine: session.Engine) -> list[str]:
    """What the engine has logged of a server that mixes groups."""
    return [
        line
        for line in engine.log.read_text().splitlines()
        if "ERROR" in line and "--separate-object-groups" in line
    ]


def test_server_that_comes_back_without_separate_groups(
    hybrid: str, lmcache: server.Server, run, check
) -> None:
    """No hits, one error, exact answers; and hits again from a good one."""
    first, second, _, last, *_ = PROMPTS
    with run("engine", hybrid, lmcache, SOON, engine_args=ONE_STEP) as engine:
        check(engine, [first])
        lmcache.kill()
        time.sleep(3)
        lmcache.start(options=())
        time.sleep(6)
        # Stored in one step, that of its first tokens would hold no state.
        check(engine, [second])
        assert engine.call(reset_prefix_cache)
        (head,) = check(engine, [second[:600]])
        assert head.cached_tokens == 0
        assert len(errors(engine)) == 1
        lmcache.kill()
        time.sleep(3)
        lmcache.start()
        assert hits_within(check, engine, last, 60)


def test_server_that_is_back_before_a_heartbeat(
    hybrid: str, lmcache: server.Server, run, check
) -> None:
    """The engine is never told; a refused store or retrieve tells it."""
    # Longer than the server takes to start: its ping is answered by the new one.
    extra = {"lmcache.mp.heartbeat_interval": 20}
    *_, prompt, other = PROMPTS
    with run("engine", hybrid, lmcache, extra) as engine:
        check(engine, [prompt])
        lmcache.restart()
        check(engine, [other])
        assert hits_within(check, engine, prompt, 60)
        # Once more, and another one: the engine stays off it.
        lmcache.restart(options=())
        assert not hits_within(check, engine, other, 30)
        assert len(errors(engine)) == 1


def test_server_that_answers_nothing(
    hybrid: str, lmcache: server.Server, run, check
) -> None:
    """Stopped, not dead: requests are answered in time, and hit when it goes on."""
    prompt, other, last = PROMPTS[1], PROMPTS[4], PROMPTS[5]
    with run("engine", hybrid, lmcache, SOON) as engine:
        check(engine, [prompt])
        assert engine.call(reset_prefix_cache)
        server_process = psutil.Process(lmcache.pid)
        server_process.suspend()
        try:
            (answer, _) = check(engine, [prompt, other])
        finally:
            server_process.resume()
        assert answer.cached_tokens == 0
        assert hits_within(check, engine, last, 60)


def test_server_killed_between_lookup_and_retrieve(
    hybrid: str, lmcache: server.Server, run, check
) -> None:
    """No failure policy is given, and vLLM's default fails the request.

    What follows is answered without a server, and with hits once there is one.
    """
    prompt, *others = PROMPTS[2:]
    with run("engine", hybrid, lmcache, SOON) as engine:
        check(engine, [prompt])
        assert engine.call(reset_prefix_cache)
        engine.call(kill_at_next_hit, lmcache.pid)
        check(engine, [prompt])
        check(engine, others)
        lmcache.restart()
        assert hits_within(check, engine, prompt, 60)
