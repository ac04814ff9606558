"""Carry a series over to another vLLM release."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Annotated

import typer
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from rich.console import Console

from scripts.series import refresh, trees, wheels
from scripts.series.merge import Merged, merge, store_steps, summary
from scripts.series.refresh import Refused, supported
from vllm_patches import releases
from vllm_patches.errors import PatchesError
from vllm_patches.patch import Read
from vllm_patches.patch_set import PatchSet

CANDIDATES = 3
"""How many series that fit best by their hunks are merged."""


def version_of(target: str) -> str:
    """The version of a release's number or a wheel's file. Raises Refused on others."""
    try:
        if target.endswith(".whl"):
            _, version, _, _ = parse_wheel_filename(Path(target).name)
            return str(version)
        return str(Version(target))
    except (InvalidVersion, InvalidWheelFilename):
        raise Refused(
            f"{target} is no version and no wheel's file; give 0.34.0, 0.34.0rc1 or "
            "PATH.whl"
        ) from None


def pristine(target: str) -> Path:
    """The Python files of a release's number or a wheel's file."""
    try:
        if target.endswith(".whl"):
            tree = trees.TREES / f".{version_of(target)}-files"
            shutil.rmtree(tree, ignore_errors=True)
            return wheels.unpack_wheel(Path(target), tree)
        return wheels.unpack_python(version_of(target))
    except subprocess.CalledProcessError:
        raise Refused(f"the package index has no vLLM {target}") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise Refused(f"{target} cannot be read ({error}); give a vLLM wheel") from None


def reader(tree: Path) -> Read:
    return lambda path: (tree / path).read_bytes()


def merged_onto(
    target: str, source: str | None = None
) -> tuple[PatchSet, list[Merged]]:
    """The series that fits best, or the source's, merged onto a release."""
    read = reader(pristine(target))
    if source:
        near = [PatchSet.of(supported(source))]
    else:
        near = PatchSet.by_fit(version_of(target), read)[:CANDIDATES]
    best: tuple[PatchSet, list[Merged]] | None = None
    fewest = -1
    for patch_set in near:
        origin = reader(wheels.unpack_python(patch_set.version))
        merged = merge(patch_set, origin, read)
        conflicts = sum(each.verdict == "conflicts" for each in merged)
        if best is None or conflicts < fewest:
            best, fewest = (patch_set, merged), conflicts
        if not conflicts:
            break
    assert best
    return best


def port(target: str, source: str | None = None) -> tuple[PatchSet, list[Merged]]:
    """Write the series of a release if nothing conflicts; else make its tree, stopped
    in the first merge that conflicts, and write nothing."""
    version = version_of(target)
    tree = trees.path(version)
    if tree.exists():
        raise Refused(f"{tree} is there already: finish or remove it")
    if releases.find(version):
        raise Refused(f"vLLM {version} has a series: `scripts/refresh {version}`")
    patch_set, merged = merged_onto(target, source)
    clean = [each.verdict == "conflicts" for each in merged]
    first = clean.index(True) if True in clean else len(merged)
    done = [each.patch for each in merged[:first] if each.patch]
    trees.make(version, done, pristine=pristine(target))
    if first == len(merged):
        refresh.write(releases.SERIES / f"v{version}", trees.export(tree))
        return patch_set, merged
    store_steps(tree, patch_set, reader(wheels.unpack_python(patch_set.version)))
    rest = "".join(each.outcome.patch.text for each in merged[first:])
    with contextlib.suppress(trees.GitFailed):  # it stops where a person goes on
        trees.git(tree, *trees.AM, "--3way", stdin=rest.encode())
    return patch_set, merged


def newer() -> list[str]:
    """The releases on the package index that are newer than the oldest supported one
    and have no series."""
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"the package index does not answer: {done.stderr.strip()}")
    oldest = Version(releases.RELEASES[0].version)
    found = [Version(each) for each in json.loads(done.stdout)["versions"]]
    new = sorted(version for version in found if version > oldest)
    return [str(version) for version in new if not releases.find(str(version))]


def watch(targets: list[str]) -> list[str]:
    """A line for each release: what became of the series that fits it best."""
    lines = []
    for target in targets:
        patch_set, merged = merged_onto(target)
        lines.append(summary(version_of(target), patch_set.version, merged))
    return lines


def main(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NEW",
            help="A vLLM version (releases, release candidates) or a wheel's file "
            "(nightlies, builds of one's own).",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", help="Release whose series to port, if not the best."),
    ] = None,
    only_watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Write nothing: one line for each NEW, or for every release of the "
            "index without a series.",
        ),
    ] = False,
) -> None:
    """Merge the series that fits best onto another release, three ways.

    Where nothing conflicts, writes the release's series. Else prints what conflicts,
    exits 1, and leaves the release's tree below .cache/checkouts stopped in the first
    merge: edit, `git add`, `git am --continue`, and so on.
    """
    console = Console(stderr=True)
    try:
        if only_watch:
            lines = watch(targets or newer())
            print("\n".join(lines) or "every release of the index has a series")
            raise typer.Exit(1 if any("conflicts" in line for line in lines) else 0)
        if len(targets or []) != 1:
            raise Refused("give one release to port to")
        (target,) = targets or []
        patch_set, merged = port(target, source)
    except (Refused, PatchesError, trees.GitFailed) as e:
        console.print(f"error: {e}", style="red", soft_wrap=True)
        raise typer.Exit(1) from None
    version = version_of(target)
    for each in merged:
        print(f"{each.name}: {each.verdict}")
        if each.conflict:
            print(re.sub(r"(?m)^", "    ", each.conflict.rstrip("\n")))
    if any(each.verdict == "conflicts" for each in merged):
        print(f"{trees.path(version)}: stopped in the first conflict")
        print("Edit there, `git add`, `git am --continue`; what is upstream: --skip.")
        print(
            f"Then add {version} to vllm_patches/releases.py: scripts/refresh {version}"
        )
        raise typer.Exit(1)
    print(f"{releases.SERIES / f'v{version}'}: written, from {patch_set.version}'s")
    print(f"Then add {version} to vllm_patches/releases.py")


if __name__ == "__main__":
    typer.run(main)
