"""Carry a series over to another vLLM release."""

import itertools
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scripts.series import trees, wheels
from scripts.series.refresh import Refused, supported
from vllm_patches import releases
from vllm_patches.errors import PatchesError
from vllm_patches.patch import Outcome
from vllm_patches.patch_set import PatchSet


def port(source: str, target: str) -> tuple[Path, list[Outcome]]:
    """Make the target's tree with the source's patches up to the first conflict.

    The tree also knows the source's files, so that git can merge the rest three ways.

    Returns:
        The tree, and how each patch fared.

    """
    tree = trees.path(target)
    if tree.exists():
        raise Refused(f"{tree} is there already: finish or remove it")
    patch_set = PatchSet.of(supported(source))
    try:
        pristine = wheels.unpack_python(target)
    except subprocess.CalledProcessError:
        raise Refused(f"the package index has no vLLM {target}") from None
    outcomes = patch_set.port(lambda path: (pristine / path).read_bytes())
    ready = itertools.takewhile(lambda outcome: not outcome.conflicts, outcomes)
    trees.make(target, [o.patch.text.encode() for o in ready if o.applies])
    origin = trees.path(source)
    if not origin.exists():
        trees.make(source, [patch.text.encode() for patch in patch_set.patches])
    trees.git(tree, "fetch", "--quiet", str(origin), f"{trees.PRISTINE}:refs/{source}")
    return tree, outcomes


def main(
    source: Annotated[str, typer.Argument(help="Release whose series to port.")],
    target: Annotated[str, typer.Argument(help="Release to port it to.")],
) -> None:
    """Apply one release's series to another release's tree, a patch at a time.

    Prints how each patch fares. The tree below .cache/checkouts has those before the
    first conflict as commits; merge the rest there, and `scripts/refresh` writes the
    release's series. Exits 1 if a patch conflicts.
    """
    console = Console(stderr=True)
    try:
        tree, outcomes = port(source, target)
    except (Refused, PatchesError, trees.GitFailed) as e:
        console.print(f"error: {e}", style="red", soft_wrap=True)
        raise typer.Exit(1) from None
    for outcome in outcomes:
        print(outcome)
    rest = list(itertools.dropwhile(lambda outcome: not outcome.conflicts, outcomes))
    done = "the patches" if not rest else f"the patches before {rest[0].patch.name}"
    print(f"{tree}: vLLM {target} with {done} as commits on it")
    if rest:
        print("Merge the rest there, in order:")
    for outcome in rest:
        file = releases.SERIES / f"v{source}" / outcome.patch.name
        print(f"  git am --3way --keep-non-patch {file}")
    print(f"Then add {target} to vllm_patches/releases.py: scripts/refresh {target}")
    raise typer.Exit(1 if rest else 0)


if __name__ == "__main__":
    typer.run(main)
