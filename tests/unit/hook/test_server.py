"""The server that an engine needs, and what one that refuses is answered for."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.group_view import EngineGroupInfo

from lmcache_hook import server, stored
from tests.unit.overlay import pools


@pytest.mark.parametrize(
    ("blocks", "has_states", "chunk"),
    [
        ([16], False, 256),
        ([384, 384, 0], True, 384),
        ([544, 544], True, 544),
        ([1600, 64], True, 1600),
        ([128, 32], False, 256),
        ([384], False, 384),
        ([96], False, 288),
    ],
)
def test_chunk_size(blocks: list[int], has_states: bool, chunk: int) -> None:
    assert server.chunk_size(blocks, has_states) == chunk


@given(st.lists(st.integers(1, 64), min_size=1, max_size=4), st.booleans())
def test_every_block_divides_the_chunk(blocks: list[int], has_states: bool) -> None:
    chunk = server.chunk_size(blocks, has_states)
    assert all(chunk % block == 0 for block in blocks)


def views(window: int) -> tuple[dict[str, Any], list[EngineGroupInfo]]:
    pool = pools.Pool(4, "HND").add(pools.full(64)).bind()
    info = EngineGroupInfo(0, (0,), 64, sw_size_tokens=window)
    return dict(pool.build().items()), [info]


def test_views_are_checked_by_lmcaches_own_code() -> None:
    hints: Any = {"kv_layout": "HND"}
    server.check_views(*views(128), hints, 256)
    with pytest.raises(ValueError, match="window size 100 must be a multiple of"):
        server.check_views(*views(100), hints, 256)
    with pytest.raises(ValueError, match="lmcache_tokens_per_chunk 96 must be a"):
        server.check_views(*views(-1), hints, 96)


def test_padded_pages_of_five_dims_are_refused_in_the_engine() -> None:
    """Up to vLLM 0.25; LMCache reads no gap there, and says so in its server only."""
    spec = pools.full(64, page_size_padded=4096)
    pool = pools.Pool(4, "NHD").add(spec, "rank5").bind()
    hints: Any = {"kv_layout": "NHD"}
    with pytest.raises(ValueError):
        server.check_views(
            dict(pool.build().items()), [EngineGroupInfo(0, (0,), 64)], hints, 256
        )


class Client:
    """Answers a registration after some seconds, or never; the rest in order."""

    def __init__(self, seconds: float | None) -> None:
        self.answers_at = None if seconds is None else time.monotonic() + seconds
        self.registration: MessagingFuture[Any] = MessagingFuture()

    def register_kv_cache(self, *args: Any) -> MessagingFuture[Any]:
        if self.answers_at == 0:
            self.registration.set_result(None)
        return self.registration

    def get_chunk_size(self) -> Any:
        class Answer:
            @staticmethod
            def result(timeout: float) -> int:
                if self.answers_at is not None:
                    time.sleep(max(0.0, self.answers_at - time.monotonic()))
                    self.registration.set_result(None)
                return 256

        return Answer


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_a_slow_registration_is_waited_for(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_PATIENCE", 0.1)
    client = Client(seconds)
    server.answer_refusals(client)
    client.register_kv_cache("views").result(timeout=60)


def test_a_refused_registration_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PATIENCE", 0.1)
    client = Client(None)
    server.answer_refusals(client)
    with pytest.raises(ConnectionRefusedError, match="its log says why"):
        client.register_kv_cache("views").result(timeout=60)


def test_a_sample_that_is_not_stored_is_reported_at_once() -> None:
    states = pools.mamba(16, [(4,)], [torch.float32])
    kept = stored.kept([pools.full(16), states], [16, 16], 64)
    answer: MessagingFuture[bool] = MessagingFuture()
    answer.set_result(False)
    sent = []

    def submit_store(request_id: str, key: Any, caches: Any, ids: Any, *_: Any) -> Any:
        sent.append(ids)
        return answer

    context = SimpleNamespace(
        submit_store=submit_store, create_recorded_event=lambda: None
    )
    worker = SimpleNamespace(
        is_kv_writer=True,
        engine_group_infos=[EngineGroupInfo(i, (i,), 16) for i in range(2)],
        transfer_ctx=context,
        kv_caches={},
        blocks_in_chunk=4,
        model_name="model##logical-0",
        lmcache_tokens_per_chunk=64,
        _create_key=lambda tokens, start, end, request_id: tokens,
    )
    with pytest.raises(ConnectionRefusedError, match="refused to store a sample"):
        server.store_sample(worker, kept)
    assert sent == [[[1] * 8, [1] * 4 + [0] * 4]], "the second chunk is part null"
    assert server._sample_key(worker, "a") == server._sample_key(worker, "b")


def test_which_engines_need_groups_kept_apart() -> None:
    full = pools.full(16)
    window = pools.attention("SlidingWindowSpec", 16, sliding_window=32)
    states = pools.mamba(16, [(4,)], [torch.float32])
    local = pools.attention("ChunkedLocalAttentionSpec", 16, attention_chunk_size=64)

    def needs(*specs: Any) -> bool:
        return server.must_be_apart(stored.kept(specs, [16] * len(specs), 64))

    assert needs(full, window) and needs(full, states) and needs(full, local)
    assert needs(states, window)
    assert not needs(full) and not needs(full, full) and not needs(window)
