"""A series merged three ways onto other files, by git."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.series import trees
from vllm_patches.patch import Files, Outcome, Patch, Read
from vllm_patches.patch_set import PatchSet


@dataclass(frozen=True)
class Merged:
    """How one patch fared."""

    outcome: Outcome
    """By its hunks alone, in memory."""
    verdict: str
    """"fits", "moved", "merged" (three ways), "upstream" or "conflicts"."""
    patch: bytes | None
    """As it is on the new files; None where it is upstream or conflicts."""
    conflict: str = ""
    """git's merge with its markers, as a diff."""

    @property
    def name(self) -> str:
        return self.outcome.patch.name


def merge(patch_set: PatchSet, source: Read, target: Read) -> list[Merged]:
    """Apply a release's series to other files, one patch on the other; a patch that
    conflicts is left out. `source` has the files that it was made for."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        trees.init(tree)
        for path in patch_set.touched:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            try:
                (tree / path).write_bytes(target(path))
            except (OSError, KeyError):
                continue
        trees.commit_pristine(tree, "The other files")
        store_steps(tree, patch_set, source)
        files = Files(target)
        return [_merge(tree, files, patch) for patch in patch_set.patches]


def store_steps(tree: Path, patch_set: PatchSet, source: Read) -> None:
    """Make every step of the touched files known to git, for three ways to start at."""
    files = Files(source)
    for patch in patch_set.patches:
        for path in patch.hunks:
            _store(tree, files.read(path))
        for path, hunks in patch.hunks.items():
            files.patch(path, hunks, search=False)


def _store(tree: Path, data: bytes) -> None:
    trees.git(tree, "hash-object", "-w", "--stdin", stdin=data)


def _merge(tree: Path, files: Files, patch: Patch) -> Merged:
    outcome = files.port(patch)
    before = trees.git(tree, "rev-parse", "HEAD")
    mail = patch.text.encode()
    try:
        trees.git(tree, *trees.AM, "--3way", stdin=mail)
    except trees.GitFailed:
        conflict = trees.git(tree, "diff")
        trees.git(tree, "am", "--abort")
        return Merged(outcome, "conflicts", None, conflict)
    if trees.git(tree, "rev-parse", "HEAD") == before or outcome.is_upstream:
        return Merged(outcome, "upstream", None)
    for path in patch.hunks:
        files.replace(path, (tree / path).read_bytes())
    (exported,) = trees.export(tree, since="HEAD~1").values()
    verdict = "merged" if outcome.conflicts else "moved" if outcome.is_moved else "fits"
    return Merged(outcome, verdict, exported)


def summary(version: str, source: str, merged: list[Merged]) -> str:
    """One line: what became of the series."""
    by: dict[str, list[str]] = {}
    for each in merged:
        by.setdefault(each.verdict, []).append(each.name.split("-")[0].lstrip("0"))
    said = "; ".join(f"{verdict} {', '.join(names)}" for verdict, names in by.items())
    return f"{version} (from {source}): {said}"
