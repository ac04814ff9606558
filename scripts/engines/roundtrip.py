"""The round trip: a second engine answers from the first one's cache, bit for bit."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts.engines import environment, models, server, session
from scripts.engines.engine import Adapter, Answer, Job, Request

BLOCK_SIZE = 256
"""Tokens per logical block of the models "hybrid" and "plain"."""
KERNEL_MULTIPLE = 32
"""Tokens that a kernel block of vLLM's CPU attention must be a multiple of."""
MODELS = environment.CACHE / "models"
PROMPT_TOKENS = (1300, 1400, 1550)
MAX_TOKENS = 16
# Blocks in the pool: more than all prompts need, less than would take long to move.
_NUM_BLOCKS = 256

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One prompt's comparison."""

    prompt_tokens: int
    stored_from: int
    """Tokens that the first engine had cached: 0, it computed the prompt."""
    cached: int
    """Tokens that the second engine took from LMCache."""
    reference_cached: int
    """Tokens that the reference took from vLLM's own prefix cache."""
    first_tokens: list[int]
    same_tokens: bool
    difference: float
    """Largest difference of a token's log-probability; NaN if either is NaN."""

    @property
    def exact(self) -> bool:
        return (
            self.same_tokens
            and self.difference == 0.0
            and self.stored_from == 0
            and self.cached >= BLOCK_SIZE
            and self.cached == self.reference_cached
        )


@dataclass(frozen=True)
class RoundTrip:
    rows: list[Row]
    groups: list[dict[str, Any]] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return all(row.exact for row in self.rows)


def prompts(lengths: Sequence[int] = PROMPT_TOKENS, seed: int = 0) -> list[list[int]]:
    """Random token ids, the same for the same seed."""
    rng = random.Random(seed)
    return [[rng.randrange(models.VOCAB_SIZE) for _ in range(n)] for n in lengths]


def run_engines(
    jobs: Sequence[Job],
    folder: Path,
    notify: Notify = print,
    env: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run the jobs' engines one after the other; returns what each answered.

    Args:
        jobs: All for the same model runner.
        folder: Gets what their common process prints.
        notify: Told each engine as it starts.
        env: Further environment variables of the engines.

    Raises:
        server.StepFailed: naming the engine that failed and its log.

    """
    with session.host(folder / "engines.log", jobs[0].runner, env) as host:
        return [_run_engine(host, job, notify) for job in jobs]


def _run_engine(host: session.Host, job: Job, notify: Notify) -> dict[str, Any]:
    notify(f"engine {job.name}")
    with host.engine(job) as engine:
        adapter = Adapter(**job.adapter) if job.adapter else None
        asked = [Request(prompt, adapter=adapter) for prompt in job.prompts]
        rounds = [engine.ask(asked) for _ in range(job.passes)]
        groups = engine.groups
    if any(answer.error for answers in rounds for answer in answers):
        raise server.StepFailed(f"engine {job.name}", engine.log)
    done = [[asdict(answer) for answer in answers] for answers in rounds]
    return {"rounds": done, "answers": done[-1], "groups": groups}


def compare(prompt_ids: Sequence[Sequence[int]], *engines: dict[str, Any]) -> list[Row]:
    """Compare the second engine's answers with the reference's."""
    answers = [[Answer(**a) for a in engine["answers"]] for engine in engines]
    return [
        Row(
            prompt_tokens=len(prompt),
            stored_from=first.cached_tokens,
            cached=second.cached_tokens,
            reference_cached=reference.cached_tokens,
            first_tokens=second.token_ids[:6],
            same_tokens=second.token_ids == reference.token_ids,
            difference=_largest_difference(second.logprobs, reference.logprobs),
        )
        for prompt, first, second, reference in zip(prompt_ids, *answers, strict=True)
    ]


def difference(answer: Answer, reference: Answer) -> float:
    """The largest difference of a token's log-probability; 0.0 for equal answers only.

    Infinite if there is no answer.
    """
    if answer.error:
        return math.inf
    largest = _largest_difference(answer.logprobs, reference.logprobs)
    return largest if answer.token_ids == reference.token_ids else largest or math.inf


def _largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return next((d for d in differences if d != d), max(differences))


@dataclass(frozen=True)
class Case:
    """What a round trip is made with."""

    model: str
    """Of ``models.FAMILIES``."""
    kernel_block_size: int
    """Tokens per kernel block, a part of the family's logical block."""
    seed: int = 0
    """Of the prompts."""

    @property
    def name(self) -> str:
        return f"{self.model}-{self.kernel_block_size}-{self.seed}"

    @property
    def family(self) -> models.Family:
        return models.FAMILIES[self.model]


def jobs(
    folder: Path, transfer: dict[str, Any], case: Case, runner: str = "v1"
) -> list[Job]:
    """The engines of one round trip: two that share a cache, and the reference.

    The reference has no connector and answers the same prompts twice: the second time
    from its own prefix cache, with as many cached tokens.
    """

    adapter = None
    if case.family.adapter:
        adapter = asdict(Adapter("adapter", 1, str(models.make_adapter(1, MODELS))))

    def job(name: str, **changes: Any) -> Job:
        name = f"{case.name}-{name}"
        return Job(
            name=name,
            model=str(models.make(case.model, MODELS)),
            prompts=prompts(seed=case.seed),
            log=str(folder / f"{name}.log"),
            runner=runner,
            kernel_block_size=case.kernel_block_size,
            max_tokens=MAX_TOKENS,
            adapter=adapter,
            engine_args={
                "num_gpu_blocks_override": _NUM_BLOCKS,
                **models.engine_args(case.model, MODELS),
            },
            **changes,
        )

    return [
        job("A", kv_transfer_config=transfer),
        job("B", kv_transfer_config=transfer),
        job("reference", passes=2),
    ]


def run(
    folder: Path, cases: Sequence[Case], runner: str = "v1", notify: Notify = print
) -> dict[Case, RoundTrip]:
    """Store with one engine, retrieve with another, compare with vLLM's own cache.

    Args:
        folder: Gets the logs.
        cases: The round trips. Neighbors of one chunk size share an LMCache server.
        runner: Model runner, "v1" or "v2".
        notify: Told each step as it starts.

    Raises:
        server.StepFailed: naming the step and its log.

    """
    folder.mkdir(parents=True, exist_ok=True)
    trips: dict[Case, RoundTrip] = {}
    for interpreter, some in groupby(cases, lambda case: case.family.interpreter):
        needed = "v1-triton" if interpreter and runner == "v1" else runner
        with session.host(folder / f"engines-{needed}.log", needed) as host:
            trips |= _run(host, folder, list(some), needed, notify)
    return trips


def _run(
    host: session.Host, folder: Path, cases: list[Case], runner: str, notify: Notify
) -> dict[Case, RoundTrip]:
    trips = {}
    for chunk_size, some in groupby(cases, lambda case: case.family.chunk_size):
        notify("starting the LMCache server")
        log = folder / f"server-{chunk_size}.log"
        with server.running(log, chunk_size=chunk_size) as lmcache:
            transfer = lmcache.connector("LMCacheLogicalConnector")
            for case in some:
                three = [
                    _run_engine(host, job, notify)
                    for job in jobs(folder, transfer, case, runner)
                ]
                rows = compare(prompts(seed=case.seed), *three)
                trips[case] = RoundTrip(rows, three[1]["groups"])
    return trips
