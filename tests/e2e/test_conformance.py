"""For each thing that vLLM hashes with a request: the same hits, another never does.

The connector's own store and lookup on a real LMCache server, without an engine.
"""

import ast
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput

from lmcache_hook import request_key
from tests.e2e.connectors import (
    CHUNK,
    CHUNKS,
    TOKENS,
    Connectors,
    lookup,
    request,
    running,
    settle,
    store,
)


@pytest.fixture(scope="module")
def connectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connectors]:
    with running(tmp_path_factory.mktemp("conformance")) as connectors:
        yield connectors


def image(identifier: str, offset: int = 7) -> dict[str, Any]:
    feature = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=40),
    )
    return {"mm_features": [feature]}


def adapter(folder: Path, name: str, weights: str = "weights") -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_text(weights)
    return {"lora_request": LoRARequest(name, 1, str(folder))}


def embeds(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    prompt_embeds = torch.randn(len(TOKENS), 8)
    return {"prompt_token_ids": None, "prompt_embeds": prompt_embeds}


DIMENSIONS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "cache_salt": lambda path: [
        {},
        {"cache_salt": "salt"},
        {"cache_salt": "pepper"},
        {"cache_salt": "a/b@c" * 40},
        {"cache_salt": "a/b@d" * 40},
    ],
    "lora_request": lambda path: [
        {},
        adapter(path / "one", "name"),
        adapter(path / "one", "other"),
        adapter(path / "two", "name"),
        adapter(path / "three", "name", weights="trained on"),
    ],
    "mm_features": lambda path: [{}, image("cat"), image("dog"), image("cat", 9)],
    "prompt_embeds": lambda path: [{}, embeds(1), embeds(2)],
}
"""A request's field -> requests that differ in it alone."""


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_same_hits_and_another_never_does(
    connectors: Connectors, dimension: str, tmp_path: Path
) -> None:
    same = {"cache_salt": f"test of {dimension}"[:30]}
    variants = [same | v for v in DIMENSIONS[dimension](tmp_path)]
    for i, variant in enumerate(variants):
        assert lookup(connectors, request(**variant)) == 0, f"variant {i}: a hit"
        store(connectors, request(**variant))
        settle(connectors)
        for known in variants[: i + 1]:
            assert lookup(connectors, request(**known)) == CHUNK * CHUNKS


def test_no_dimension_is_forgotten() -> None:
    """What vLLM's function reads of a request, in it and in all that it calls."""
    read: set[str] = set()
    pending, seen = [kv_cache_utils.generate_block_hash_extra_keys], set()
    while pending:
        function = pending.pop()
        tree = ast.parse(inspect.getsource(function))
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id="request"), attr=attr):
                    read |= set() if attr.startswith("_") else {attr}
                case ast.Call(func=ast.Name(id=name)):
                    called = getattr(kv_cache_utils, name, None)
                    if inspect.isfunction(called) and called not in seen:
                        seen.add(called)
                        pending.append(called)
    assert read == set(DIMENSIONS), "a dimension without variants, or one that is gone"


def test_what_vllm_hashes_next_counts_too(
    connectors: Connectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extra key of a kind that nobody knows yet."""
    own = kv_cache_utils.generate_block_hash_extra_keys

    def extended(asked: Any, *args: int) -> Any:
        keys, at = own(asked, *args)
        return (*(keys or ()), ("to come", asked.priority)), at

    monkeypatch.setattr(request_key, "generate_block_hash_extra_keys", extended)
    store(connectors, request(priority=1))
    settle(connectors)
    assert lookup(connectors, request(priority=1)) == CHUNK * CHUNKS
    assert lookup(connectors, request(priority=2)) == 0


def test_a_later_image_spares_what_is_before_it(connectors: Connectors) -> None:
    """As in vLLM's own prefix cache: chunks before the image are shared."""
    same = {"cache_salt": "late"}
    store(connectors, request(**same, **image("cat", CHUNK + 20)))
    settle(connectors)
    other = request(**same, **image("dog", CHUNK + 20))
    assert lookup(connectors, other) == CHUNK


def test_an_adapter_replaced_in_place(connectors: Connectors, tmp_path: Path) -> None:
    """vLLM's own cache cannot tell its blocks apart: nothing is stored any more."""
    before = adapter(tmp_path / "adapter", "replaced")
    store(connectors, request(**before))
    settle(connectors)
    assert lookup(connectors, request(**before)) == CHUNK * CHUNKS
    after = adapter(tmp_path / "adapter", "replaced", weights="trained anew")
    os.utime(tmp_path / "adapter" / "adapter_model.safetensors", ns=(1, 1))
    for _ in range(2):
        assert lookup(connectors, request(**after)) == 0
        store(connectors, request(**after))
        settle(connectors)


def test_an_adapter_that_cannot_be_read(connectors: Connectors, tmp_path: Path) -> None:
    """If it cannot be told which weights they are, the answer is no."""
    gone = {"lora_request": LoRARequest("gone", 1, str(tmp_path / "a" / "b" / "c"))}
    for _ in range(2):
        assert lookup(connectors, request(**gone)) == 0
        store(connectors, request(**gone))
        settle(connectors)


def test_a_scheduler_that_was_told_no_namespace(
    connectors: Connectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor that passes no handshake on: neither hits nor stores."""
    salted = {"cache_salt": "no handshake"}
    monkeypatch.setattr(connectors.scheduler, "fingerprint", None)
    store(connectors, request(**salted))
    assert lookup(connectors, request(**salted)) == 0
    monkeypatch.undo()
    settle(connectors)
    assert lookup(connectors, request(**salted)) == 0


def test_stores_from_windows_are_waited_for(
    connectors: Connectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step after them only, and only where blocks leave a window."""
    scheduler, worker, _ = connectors
    empty = SchedulerOutput.make_empty()
    scheduler.build_connector_meta(empty)  # After the store of another test.
    for window, waits in ((64, [True, False]), (-1, [False, False])):
        kept = [k._replace(window=window) for k in scheduler._kept]
        monkeypatch.setattr(scheduler, "_kept", kept)
        store(connectors, request(cache_salt=f"window of {window}"))
        assert not worker._get_connector_metadata().need_flush_before_forward
        steps = [scheduler.build_connector_meta(empty) for _ in waits]
        assert [step.need_flush_before_forward for step in steps] == waits
