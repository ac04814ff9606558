"""An answer comes from entries of the same prefix only: adapters, salts, embeddings."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.engines import models, roundtrip, server, session
from scripts.engines.engine import Adapter, Answer, Request
from tests.e2e.conftest import MODELS, new_job
from tests.e2e.inside import reset_prefix_cache

PROMPT = roundtrip.prompts((1300,), seed=7)[0]
CACHED = 1280
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}

# Its entries, if they are not keyed by all of a request, answer all that follow.
ORDER = ("first", "second", "none", "salted", "salted otherwise", "first, salted")


def adapter(number: int) -> Adapter:
    path = models.make_adapter(number, MODELS)
    return Adapter(f"adapter-{number}", number, str(path))


def named_requests() -> dict[str, Request]:
    return {
        "first": Request(PROMPT, adapter=adapter(1)),
        "second": Request(PROMPT, adapter=adapter(2)),
        "none": Request(PROMPT),
        "salted": Request(PROMPT, cache_salt="pepper"),
        "salted otherwise": Request(PROMPT, cache_salt="salt"),
        "first, salted": Request(PROMPT, adapter=adapter(1), cache_salt="salt"),
    }


@pytest.fixture(scope="module")
def answers(
    host: session.Host, plain: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Answer]]:
    """What each engine answered to each request; "reference" has no connector."""
    folder = tmp_path_factory.mktemp("requests")
    requests = named_requests()
    orders = {"stores": ORDER, "retrieves": ORDER[::-1], "reference": ORDER}
    answers = {}
    with server.running(folder / "server.log") as lmcache:
        transfer = lmcache.connector("LMCacheLogicalConnector")
        for name, order in orders.items():
            job = new_job(
                folder,
                name,
                plain,
                [],
                engine_args=LORA,
                kv_transfer_config=None if name == "reference" else transfer,
            )
            with host.engine(job) as engine:
                asked = [requests[key] for key in order]
                answers[name] = dict(zip(order, engine.ask(asked)))
                if name == "reference":
                    again = engine.ask(asked)
                    answers["reference again"] = dict(zip(order, again))
    return answers


def test_one_thread_answers_alike_from_any_cache(answers) -> None:
    """The other tests compare answers with computed ones."""
    for key, answer in answers["reference again"].items():
        assert answer.cached_tokens == CACHED
        assert roundtrip.difference(answer, answers["reference"][key]) == 0.0


def test_each_request_has_an_answer_of_its_own(answers) -> None:
    """Or nothing here would show a hit of another's entries."""
    reference = answers["reference"]
    tokens = [tuple(reference[key].token_ids) for key in ("first", "second", "none")]
    assert len(set(tokens)) == 3


@pytest.mark.parametrize("request_", ORDER)
def test_nothing_of_another_request_is_served(answers, request_: str) -> None:
    """Adapter 1, adapter 2, none, and salts, one after the other on one engine."""
    answer = answers["stores"][request_]
    assert answer.cached_tokens == 0
    assert roundtrip.difference(answer, answers["reference"][request_]) == 0.0


@pytest.mark.parametrize("request_", ORDER)
def test_the_same_request_hits_in_another_engine(answers, request_: str) -> None:
    """Asked in another order there."""
    answer = answers["retrieves"][request_]
    assert answer.cached_tokens == CACHED
    assert roundtrip.difference(answer, answers["reference"][request_]) == 0.0


def test_adapter_replaced_in_place_gets_no_hit_from_before(
    plain: str, lmcache: server.Server, run, tmp_path: Path
) -> None:
    """Same name, same id, same path, other weights."""
    path = tmp_path / "adapter"
    first, second = adapter(1), adapter(2)
    loaded = Adapter("in-place", 1, str(path))
    with run("replaces", plain, lmcache, engine_args=LORA) as engine:
        shutil.copytree(first.path, path)
        engine.ask([Request(PROMPT, adapter=loaded)])
        shutil.copytree(second.path, path, dirs_exist_ok=True)
        # vLLM's own prefix cache knows the adapter by its name, too.
        assert engine.call(reset_prefix_cache)
        replaced = replace(loaded, load_inplace=True)
        (answer,) = engine.ask([Request(PROMPT, adapter=replaced)])
        assert engine.call(reset_prefix_cache)
        (again,) = engine.ask([Request(PROMPT, adapter=loaded)])
    with run("reference", plain, engine_args=LORA) as engine:
        (reference,) = engine.ask([Request(PROMPT, adapter=second)])
    assert answer.cached_tokens == 0
    assert roundtrip.difference(answer, reference) == 0.0
    assert roundtrip.difference(again, reference) == 0.0


def test_prompts_given_as_embeddings_are_kept_apart(
    plain: str, lmcache: server.Server, run
) -> None:
    """Of one length, so that nothing but the embeddings tells them apart."""
    engine_args = {"enable_prompt_embeds": True}
    requests = [Request(PROMPT, embeds_seed=seed) for seed in (1, 2)]
    with run("stores", plain, lmcache, engine_args=engine_args) as engine:
        stored = engine.ask(requests)
    with run("retrieves", plain, lmcache, engine_args=engine_args) as engine:
        # In the other order: the second one's entries are not the first one's.
        retrieved = engine.ask(requests[::-1])[::-1]
    with run("reference", plain, engine_args=engine_args) as engine:
        reference = engine.ask(requests)
    assert reference[0].token_ids != reference[1].token_ids
    assert [answer.cached_tokens for answer in stored] == [0, 0]
    for answer, wanted in zip(stored + retrieved, reference * 2, strict=True):
        assert roundtrip.difference(answer, wanted) == 0.0
