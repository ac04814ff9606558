"""Which states the connector stores of a hybrid, by vLLM's own scheduler.

With speculative decoding a Mamba group's table holds extra blocks, which vLLM moves as
a request grows. Here vLLM's scheduler plans the steps and LMCache's connector, with
ours, what to store; a worker of symbols does what vLLM's runners do with states
(``preprocess_mamba`` and ``postprocess_mamba_fused_kernel``,
vllm/v1/worker/mamba_utils.py): a block holds the state of some tokens, or of others.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from lmcache.integration.vllm.lmcache_mp_metrics import LMCacheMPConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.mamba.checkpoint import (
    compute_mamba_prefill_checkpoints,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_hook import request_key, stored
from lmcache_hook.connector import LMCacheLogicalConnector
from tests.unit.hook import engines
from tests.unit.overlay import pools

BLOCK = 4
ATTENTION, STATES = 0, 1


class Hook(LMCacheLogicalConnector):
    """The scheduler's part, on a server that has nothing."""

    def __init__(self, specs: list[Any], chunk: int, drafts: int, decode: bool) -> None:
        self._role = KVConnectorRole.SCHEDULER
        self.request_trackers: dict[str, Any] = {}
        self._eager_prefetch = False
        self.scheduler_adapter = SimpleNamespace(
            lmcache_tokens_per_chunk=chunk,
            maybe_submit_lookup_request=lambda *_, **__: None,
            check_lookup_result=lambda _: 0,
            cleanup_lookup_result=lambda _: None,
            report_block_allocations=lambda _: None,
            end_session=lambda _: None,
        )
        self.lazy_offload = self._has_stored = False
        self._can_store, self._save_decode_cache = True, decode
        self._mamba_relocation_window = drafts
        self._reserve_last_token_for_lookup = True
        self._connector_stats = LMCacheMPConnectorStats()
        self._kv_cache_events: list[Any] = []
        self._group_tokens_per_block = self._tokens_per_block = [BLOCK] * len(specs)
        self._hit_alignment_tokens = BLOCK
        self._specs = specs
        self._kept = stored.kept(specs, self._tokens_per_block, chunk)
        self.fingerprint, self._complaint = "00", ""
        self._adapters = request_key.Adapters()


class Worker:
    """Keeps which tokens each block's state is of; checks what is stored."""

    def __init__(
        self, drafts: int, chunk: int, kept: list[stored.Kept], drop: bool | None
    ) -> None:
        self.drafts, self.chunk, self.kept = drafts, chunk, kept
        self.drop = drop
        """Whether checkpoints leave EAGLE's block out; None: there are none."""
        self.states: dict[int, list[int]] = {}
        self.keys: dict[tuple[int, int], int] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.columns: dict[str, int] = {}
        self.accepted: dict[str, int] = defaultdict(lambda: 1)
        self.stored = 0

    def step(self, output: Any, requests: dict[str, Request], draw: Any) -> Any:
        """Run a step; returns each request's sampled tokens."""
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            self.columns.pop(new.req_id, None)
            self.accepted.pop(new.req_id, None)
        cached = output.scheduled_cached_reqs
        for request_id, ids in zip(cached.req_ids, cached.new_block_ids):
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = [list(i) for i in ids]
                self.columns.pop(request_id, None)
                self.accepted.pop(request_id, None)
            elif ids:
                for row, more in zip(self.tables[request_id], ids):
                    row.extend(more)
        computed = {n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens))
        sampled = {}
        for request_id, scheduled in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            tokens = list(requests[request_id].all_token_ids)
            sampled[request_id] = self._forward(
                request_id, tokens, computed[request_id], scheduled, drafts, draw
            )
        for stored_request in output.kv_connector_metadata.requests:
            if stored_request.direction == "STORE":
                self._check(stored_request.op)
        return sampled

    def _forward(
        self,
        request_id: str,
        tokens: list[int],
        computed: int,
        scheduled: int,
        drafts: list[int],
        draw: Any,
    ) -> list[int]:
        attention, states = self.tables[request_id]
        before = self.columns.get(request_id, (computed - 1) // BLOCK)
        column = -(-(computed + scheduled) // BLOCK) - 1
        self.columns[request_id] = column
        if before not in (-1, column):
            source = states[before + self.accepted[request_id] - 1]
            self.states[states[column]] = self.states[source]
            self.accepted[request_id] = 1
        if computed:
            start = states[column + self.accepted[request_id] - 1]
            assert self.states[start] == tokens[:computed], "the worker of symbols"
        certain = computed + scheduled - len(drafts)
        run = tokens[:certain] + drafts
        for at in range(computed, computed + scheduled):
            self.keys[attention[at // BLOCK], at % BLOCK] = run[at]
        if self.drop is not None and not drafts:
            (offset,), (at,) = compute_mamba_prefill_checkpoints(
                [certain],
                [scheduled],
                hash_block_size=BLOCK,
                mamba_block_size=BLOCK,
                checkpoint_alignment=1,
                drop_eagle_block=self.drop,
                cache_hit_alignment_tokens=BLOCK,
            )
            if offset:
                self.states[states[at]] = run[: computed + offset]
        for i in range(len(drafts) + 1):
            self.states[states[column + i]] = run[: certain + i]
        if certain < len(tokens):
            return []
        right = draw(st.integers(0, len(drafts)))
        next_token = draw(st.integers(0, 9))
        self.accepted[request_id] = right + 1
        aligned = (certain + right) // BLOCK * BLOCK
        if aligned >= certain:
            source = states[column + aligned - certain]
            self.states[states[aligned // BLOCK - 1]] = self.states[source]
        return [*drafts[:right], next_token]

    def _check(self, op: Any) -> None:
        """What is stored are the keys, and the state, of the tokens in the key."""
        ids = [list(group) for group in op.block_ids]
        stored.null_unstorable(ids, self.kept)
        blocks = self.chunk // BLOCK
        for i, end in enumerate(range(op.start + self.chunk, op.end + 1, self.chunk)):
            tokens = op.token_ids[:end]
            for j, block in enumerate(ids[ATTENTION][i * blocks : (i + 1) * blocks]):
                at = end - self.chunk + j * BLOCK
                kept = [self.keys[block, offset] for offset in range(BLOCK)]
                assert kept == tokens[at : at + BLOCK]
            if state := ids[STATES][(i + 1) * blocks - 1]:
                assert self.states[state] == tokens, (state, end)
                self.stored += 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return engines.save_config(tmp_path_factory.mktemp("model"))


def make(
    model: str,
    drafts: int,
    num_blocks: int = 64,
    batched: int = 40,
    *,
    checkpoints: bool,
    eagle: bool,
) -> Any:
    """A scheduler of steps of up to ``batched`` tokens, and its groups."""
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": drafts,
        "prompt_lookup_max": 2,
    }
    config = engines.configure(
        model,
        kv_transfer_config=None,
        max_model_len=128,
        max_num_seqs=3,
        speculative_config=ngram if drafts else None,
        async_scheduling=False,
    )
    config.scheduler_config.max_num_batched_tokens = batched
    config.scheduler_config.max_num_scheduled_tokens = batched
    config.cache_config.mamba_cache_mode = "align"
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = num_blocks
    if drafts and eagle:
        # As its methods answer for EAGLE and MTP, without a model of theirs.
        for method in ("use_eagle", "use_eagle_block_drop"):
            object.__setattr__(config.speculative_config, method, lambda: True)
    checkpoint = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    state = pools.mamba(
        BLOCK,
        [(8,)],
        [torch.float32],
        num_speculative_blocks=drafts,
        **checkpoint if checkpoints else {},
    )
    groups = [
        KVCacheGroupSpec(["attention"], pools.full(BLOCK)),
        KVCacheGroupSpec(["states"], state),
    ]
    plan = KVCacheConfig(num_blocks, [], groups)
    manager = StructuredOutputManager(config)
    return Scheduler(config, plan, manager, block_size=BLOCK), groups


def serve(scheduler: Any, hook: Hook, worker: Worker, prompts: Any, draw: Any) -> None:
    """Answer all prompts, with drafts that are right or wrong as drawn."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    scheduler.connector = hook
    hook.bind_kv_cache_manager(scheduler.kv_cache_manager)
    requests = {}
    for i, (prompt, max_tokens) in enumerate(prompts):
        request = Request(
            f"request-{i}",
            prompt,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            block_hasher=hasher,
        )
        requests[request.request_id] = request
        scheduler.add_request(request)
    sending: set[str] = set()
    for _ in range(500):
        if not scheduler.has_requests():
            return
        output = scheduler.schedule()
        sampled = worker.step(output, requests, draw)
        ids = list(output.num_scheduled_tokens)
        done = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[sampled[request_id] for request_id in ids],
            kv_connector_output=KVConnectorOutput(finished_sending=sending or None),
        )
        scheduler.update_from_output(output, done)
        sending = set(scheduler.finished_req_ids)
        drafted = [r.request_id for r in scheduler.running if sampled.get(r.request_id)]
        count = worker.drafts and draw(st.integers(0, worker.drafts))
        drafts = [[draw(st.integers(0, 9)) for _ in range(count)] for _ in drafted]
        scheduler.update_draft_token_ids(DraftTokenIds(drafted, drafts))
    raise AssertionError("requests are left")


@given(data=st.data())
@settings(suppress_health_check=list(HealthCheck), deadline=None)
def test_a_stored_state_is_that_of_the_tokens_in_its_key(model: str, data: Any) -> None:
    draw = data.draw
    drafts = draw(st.integers(0, 3))
    chunk = BLOCK * draw(st.integers(1, 2))
    batched = draw(st.sampled_from([4, 8, 12, 40]))
    num_blocks = draw(st.sampled_from([32, 200]))
    common = draw(st.lists(st.integers(0, 9), min_size=1, max_size=30))
    tails = st.lists(st.integers(0, 9), min_size=1, max_size=20)
    prompts = [
        (
            common[: draw(st.integers(0, len(common)))] + draw(tails),
            draw(st.integers(1, 14)),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    checkpoints, eagle = draw(st.booleans()), draw(st.booleans())
    scheduler, groups = make(
        model, drafts, num_blocks, batched, checkpoints=checkpoints, eagle=eagle
    )
    hook = Hook(
        [g.kv_cache_spec for g in groups], chunk, drafts, decode=draw(st.booleans())
    )
    drop = scheduler.use_eagle_block_drop if checkpoints else None
    serve(scheduler, hook, Worker(drafts, chunk, hook._kept, drop), prompts, draw)


@pytest.mark.parametrize(
    "checkpoints, eagle, states", [(False, False, 1), (True, False, 1), (True, True, 0)]
)
def test_states_of_a_prompt_in_one_step(
    model: str, checkpoints: bool, eagle: bool, states: int
) -> None:
    """11 tokens: vLLM splits at 8, or leaves that state in passing, or the one at 4."""
    scheduler, groups = make(model, 1, checkpoints=checkpoints, eagle=eagle)
    hook = Hook([group.kv_cache_spec for group in groups], BLOCK, 1, decode=False)
    drop = scheduler.use_eagle_block_drop if checkpoints else None
    worker = Worker(1, BLOCK, hook._kept, drop)
    serve(scheduler, hook, worker, [(list(range(11)), 1)], lambda _: 0)
    assert worker.stored == states
