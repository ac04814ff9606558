"""Turn a release's patch files into commits, and back."""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scripts.series import trees
from vllm_patches import releases, sums
from vllm_patches.patch_set import OVERLAY, PatchSet
from vllm_patches.releases import Release


class Refused(Exception):
    """Nothing was done; says why and the way out."""


def refresh(release: str) -> list[str]:
    """The first call makes the release's tree, later ones write its commits back.

    Returns:
        What was done, a line each.

    """
    folder = supported(release).series
    tree = trees.path(release)
    on_disk = read(folder)
    if not tree.exists():
        trees.make(release, on_disk.values())
        return [
            f"{tree}: vLLM {release} with {len(on_disk)} patches as commits on it",
            "Edit, commit (or rebase --interactive), then run this again.",
        ]
    if trees.unfinished(tree):
        raise Refused(f"{tree} has edits that are not committed: commit or amend them")
    new = trees.export(tree)
    if on_disk and on_disk not in (new, trees.export(tree, trees.WRITTEN)):
        if trees.git(tree, "rev-parse", "HEAD") != trees.git(
            tree, "rev-parse", trees.WRITTEN
        ):
            raise Refused(
                f"both {folder} and {tree} changed since the tree was made: move "
                "yours aside, remove the tree, run this again and commit it there"
            )
        shutil.rmtree(tree)
        return ["The patch files changed since the tree was made.", *refresh(release)]
    changes = write(folder, new)
    trees.git(tree, "update-ref", trees.WRITTEN, "HEAD")
    return changes or [f"{folder}: {len(new)} patches, nothing changed"]


def supported(release: str) -> Release:
    """The release's facts. Raises Refused if there is no series for it."""
    if known := releases.find(release):
        return known
    near = PatchSet.nearest(release).version
    raise Refused(
        f"vLLM {release} is not supported; the nearest supported release is {near}: "
        f"`scripts/port {release}` ports a series"
    )


def read(folder: Path) -> dict[str, bytes]:
    """A folder's patch files by name, in their order."""
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.patch"))}


def write(folder: Path, patches: dict[str, bytes]) -> list[str]:
    """Make the folder hold just these; returns what changed."""
    folder.mkdir(parents=True, exist_ok=True)
    old = read(folder)
    changes = []
    for name in sorted(old.keys() | patches.keys()):
        if name not in patches:
            (folder / name).unlink()
            changes.append(f"removed {name}")
        elif patches[name] != old.get(name):
            (folder / name).write_bytes(patches[name])
            changes.append(f"wrote {name}")
    sums.write(folder)
    return changes


def list_overlay() -> str:
    """Write the overlay's list anew; says whether it changed."""
    return f"{OVERLAY / sums.NAME}: " + (
        "written" if sums.write(OVERLAY) else "current"
    )


def main(
    release: Annotated[
        str | None,
        typer.Argument(
            help="vLLM release, as in 0.32.0; left out, only the overlay is listed."
        ),
    ] = None,
) -> None:
    """Edit a release's patches as commits: make its tree, or write the tree back.

    The first call makes a git repository of the pristine release below .cache/checkouts
    with the series applied. Edit and commit there. The next call writes the commits
    back as patch files; without an edit it changes nothing. Either lists the overlay's
    files and hashes anew (SHA256SUMS), by which the tool reads them.
    """
    try:
        lines = [list_overlay(), *(refresh(release) if release else [])]
    except (Refused, trees.GitFailed) as e:
        Console(stderr=True).print(f"error: {e}", style="red", soft_wrap=True)
        raise typer.Exit(1) from None
    for line in lines:
        print(line)


if __name__ == "__main__":
    typer.run(main)
