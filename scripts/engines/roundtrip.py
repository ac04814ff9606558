"""The round trip: a second engine answers from the first one's cache, bit for bit."""

import math
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from scripts.engines import environment, models, server, session
from scripts.engines.engine import Answer, Job
from vllm_patches.installation import Installation

BLOCK_SIZE = 256
"""Tokens per logical block of the models "hybrid" and "plain"."""
KERNEL_MULTIPLE = 32
"""Tokens that a kernel block of vLLM's CPU attention must be a multiple of."""
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
        rounds = [engine.ask(job.prompts) for _ in range(job.passes)]
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

    def job(name: str, **changes: Any) -> Job:
        name = f"{case.name}-{name}"
        return Job(
            name=name,
            model=str(models.make(case.model, environment.CACHE / "models")),
            prompts=prompts(seed=case.seed),
            log=str(folder / f"{name}.log"),
            runner=runner,
            kernel_block_size=case.kernel_block_size,
            max_tokens=MAX_TOKENS,
            engine_args={
                "block_size": case.family.block_size,
                "num_gpu_blocks_override": _NUM_BLOCKS,
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
    trips = {}
    with session.host(folder / "engines.log", runner) as host:
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


ModelChoice = Enum(  # type: ignore[misc]
    "ModelChoice", {name: name for name in models.FAMILIES}, type=str
)


class RunnerChoice(str, Enum):
    v1 = "v1"
    v2 = "v2"


def main(
    kernel_block_size: Annotated[
        list[int],
        typer.Option(
            help="Tokens per kernel block, which divide the model's logical block "
            "(256 for hybrid and plain). May be repeated."
        ),
    ] = [KERNEL_MULTIPLE],  # noqa: B006
    model: Annotated[
        list[ModelChoice],
        typer.Option(
            help="Tiny model: with Mamba layers, without, or of another family. May be "
            "repeated.",
        ),
    ] = [ModelChoice("hybrid")],  # noqa: B006, B008
    runner: Annotated[
        RunnerChoice, typer.Option(help="vLLM's model runner.")
    ] = RunnerChoice.v1,
) -> None:
    """Show that a second engine answers from the first one's cache, bit for bit.

    Engine A computes and stores three prompts, engine B retrieves them in a fresh
    process, and a reference engine without a connector answers them from vLLM's own
    prefix cache. Exits 0 only if B took a block or more of every prompt from LMCache
    and answered exactly as the reference.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(stderr=True)
    cases = [Case(m.value, size) for m in model for size in kernel_block_size]
    for case in cases:
        size, block_size = case.kernel_block_size, case.family.block_size
        if size <= 0 or block_size % size or size % KERNEL_MULTIPLE:
            console.print(
                f"error: --kernel-block-size {size}: the CPU kernels take a multiple "
                f"of {KERNEL_MULTIPLE} that divides {case.model}'s blocks of "
                f"{block_size}; try {KERNEL_MULTIPLE} or {block_size}",
                style="red",
                soft_wrap=True,
            )
            raise typer.Exit(2)
    folder = environment.CACHE / "runs" / time.strftime("%Y%m%d-%H%M%S")
    with _progress(console) as notify:
        try:
            trips = run(folder, cases, runner.value, notify)
        except server.StepFailed as e:
            console.print(f"error: {e}", style="red", soft_wrap=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            console.print("interrupted; nothing is left running", style="red")
            raise typer.Exit(130) from None
    out = Console()
    for case, trip in trips.items():
        out.print(f"{case.model}, kernel blocks of {case.kernel_block_size} tokens")
        out.print(_prompt_table(trip), _group_table(trip))
    if not all(trip.exact for trip in trips.values()):
        out.print(f"NOT exact. The logs are in {folder}", style="red", soft_wrap=True)
        raise typer.Exit(1)
    release = Installation.find().version
    out.print(f"Exact on vLLM {release}: every difference is 0.0", style="green")


@contextmanager
def _progress(console: Console) -> Iterator[Notify]:
    started = time.monotonic()
    with console.status("") as status:

        def notify(step: str) -> None:
            console.print(f"{time.monotonic() - started:6.1f} s  {step}")
            status.update(step)

        yield notify


def _prompt_table(trip: RoundTrip) -> Table:
    table = Table("prompt tokens", "A cached", "B cached", "reference cached")
    table.add_column("first tokens")
    table.add_column("largest log-prob difference", justify="right")
    for row in trip.rows:
        table.add_row(
            *map(str, (row.prompt_tokens, row.stored_from, row.cached)),
            str(row.reference_cached),
            " ".join(map(str, row.first_tokens)),
            str(row.difference),
            style=None if row.exact else "red",
        )
    return table


def _group_table(trip: RoundTrip) -> Table:
    table = Table("group", "kind", "layers", "block size", "kernel block size")
    table.add_column("page bytes")
    table.add_column("view")
    for i, group in enumerate(trip.groups):
        table.add_row(
            str(i),
            *(
                str(group[key])
                for key in (
                    "kind",
                    "layers",
                    "block_size",
                    "kernel_block_size",
                    "page_size_bytes",
                    "view",
                )
            ),
        )
    return table


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(epilog=environment.RELEASE_HELP)(main)
    app(prog_name="scripts/roundtrip")
