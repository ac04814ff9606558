"""The command scripts/roundtrip: its options and what it prints."""

import signal
import sys
import time
from enum import Enum
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from scripts.engines import environment, models, server
from scripts.engines.roundtrip import (
    KERNEL_MULTIPLE,
    Case,
    RoundTrip,
    run,
)
from vllm_patches.check.command import progress
from vllm_patches.installation import Installation

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
    runs = environment.CACHE / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=runs))
    with progress(console) as notify:
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
