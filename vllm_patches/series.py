"""A release's patches and the overlay, applied in memory."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cached_property
from pathlib import Path

import whatthepatch
from packaging.version import Version

from vllm_patches import releases
from vllm_patches.errors import PatchesError

OVERLAY = Path(__file__).parent / "overlay"
CONTRACT = re.compile(rb"^CONTRACT_VERSION = (\d+)$", re.MULTILINE)

Read = Callable[[str], bytes]
"""Gives the bytes of a file by its path relative to the root, "vllm/...py". Raises
OSError or KeyError where there is none."""


@dataclass(frozen=True)
class Hunk:
    """One hunk of one file."""

    path: str
    number: int
    """Counted from 1 in its file."""
    start: int
    """Its first line in the file before the patch, counted from 0."""
    old: list[str]
    new: list[str]

    def matches(self, lines: list[str], start: int) -> bool:
        """Whether the lines that the hunk expects are at `start`."""
        return start >= 0 and lines[start : start + len(self.old)] == self.old


@dataclass(frozen=True)
class Patch:
    """One `git format-patch` file."""

    name: str
    text: str

    @cached_property
    def hunks(self) -> dict[str, list[Hunk]]:
        """The hunks by file, in the file's order. Raises PatchesError on a patch that
        does more than modify files."""
        body = self.text.rsplit("\n-- \n", 1)[0]  # git's version
        files: dict[str, list[Hunk]] = {}
        for diff in whatthepatch.parse_patch(body.split("\n")):
            if diff.header is None:
                continue
            path = diff.header.new_path
            if diff.header.old_path != path or not diff.changes:
                raise PatchesError(
                    f"{self.name} adds, removes or renames {path}; a patch may only "
                    "modify files: put new ones into the overlay"
                )
            files[path] = list(_hunks(path, diff.changes))
        return files


def _hunks(path: str, changes: list[whatthepatch.patch.Change]) -> Iterator[Hunk]:
    numbers = dict.fromkeys(change.hunk for change in changes)
    for number, key in enumerate(numbers, start=1):
        hunk = [change for change in changes if change.hunk == key]
        start = min((c.old for c in hunk if c.old is not None), default=1) - 1
        old = [change.line for change in hunk if change.old is not None]
        new = [change.line for change in hunk if change.new is not None]
        yield Hunk(path, number, start, old, new)


@dataclass(frozen=True)
class PatchSet:
    """What is done to a release: its series and the overlay."""

    version: str
    patches: list[Patch]
    overlay: dict[str, bytes]
    """New files, by their path relative to the root."""

    @classmethod
    def load(cls, version: str, folder: Path, overlay: Path = OVERLAY) -> "PatchSet":
        """Read a series' folder and the overlay's."""
        patches = [
            Patch(path.name, path.read_bytes().decode())
            for path in sorted(folder.glob("*.patch"))
        ]
        if not patches:
            raise PatchesError(f"no patches in {folder}; reinstall vllm-logical-blocks")
        files = {
            path.relative_to(overlay).as_posix(): path.read_bytes()
            for path in sorted(overlay.rglob("*"))
            if path.is_file() and path.suffix != ".pyc"
        }
        return cls(version, patches, files)

    @property
    def contract(self) -> int | None:
        """The overlay's contract version."""
        return contract_version(self.overlay.values())

    @property
    def touched(self) -> list[str]:
        """The files that the series modifies."""
        return list(dict.fromkeys(path for p in self.patches for path in p.hunks))

    def apply(self, read: Read) -> dict[str, bytes]:
        """The modified files' new bytes. Every hunk must match at its very line;
        raises PatchesError on the first that does not."""
        files = _Files(read)
        for patch in self.patches:
            for path, hunks in patch.hunks.items():
                for hunk, offset in files.patch(path, hunks, search=False):
                    if offset is None:
                        raise PatchesError(
                            f"{patch.name} does not apply: {_where(hunk)} does not "
                            f"match; is this vLLM {self.version} as released?"
                        )
        return files.bytes()

    def report(self, read: Read) -> list[str]:
        """One line per patch: whether it applies, its hunks searched for near their
        lines as `git am` does, and which do not."""
        files = _Files(read)
        lines = []
        for patch in self.patches:
            failed = [
                _where(hunk)
                for path, hunks in patch.hunks.items()
                for hunk, offset in files.patch(path, hunks, search=True)
                if offset is None
            ]
            result = "does not apply: " + "; ".join(failed) if failed else "applies"
            lines.append(f"{patch.name}: {result}")
        return lines


def _where(hunk: Hunk) -> str:
    return f"{hunk.path} hunk {hunk.number} (line {hunk.start + 1})"


class _Files:
    """Files under a series, kept as lines without their ends."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._lines: dict[str, list[str]] = {}

    def patch(
        self, path: str, hunks: list[Hunk], search: bool
    ) -> list[tuple[Hunk, int | None]]:
        """Apply one file's hunks. Gives each with its offset in lines, None where it
        does not match; with `search`, the nearest place that matches counts."""
        if path not in self._lines:
            try:
                self._lines[path] = self._read(path).decode().split("\n")
            except (OSError, KeyError):
                self._lines[path] = []
        lines = self._lines[path]
        results: list[tuple[Hunk, int | None]] = []
        grown = 0  # by how many lines the hunks so far moved the next one
        for hunk in hunks:
            reach = range(len(lines) if search else 1)
            offsets = sorted({sign * n for n in reach for sign in (1, -1)}, key=abs)
            offset = next(
                (n for n in offsets if hunk.matches(lines, hunk.start + grown + n)),
                None,
            )
            results.append((hunk, offset))
            if offset is not None:
                start = hunk.start + grown + offset
                lines[start : start + len(hunk.old)] = hunk.new
                grown += offset + len(hunk.new) - len(hunk.old)
        return results

    def bytes(self) -> dict[str, bytes]:
        return {path: "\n".join(lines).encode() for path, lines in self._lines.items()}


def contract_version(files: Iterable[bytes]) -> int | None:
    """The `CONTRACT_VERSION` that one of the files sets, None where none does."""
    for data in files:
        if match := CONTRACT.search(data):
            return int(match[1])
    return None


def public(version: str) -> str:
    """A version without its local tag: the release."""
    return Version(version).public


def find(version: str) -> PatchSet | None:
    """The patch set for a vLLM version, its local tag aside; None where there is
    none."""
    for release in releases.RELEASES:
        if release.version == public(version):
            return PatchSet.load(release.version, release.series)
    return None


def nearest(version: str) -> PatchSet:
    """The patch set of the supported release nearest to a version."""

    def distance(release: releases.Release) -> int:
        ours, theirs = Version(release.version), Version(version)
        weights = (1_000_000, 1_000, 1)
        pairs = zip(weights, ours.release, theirs.release)
        return abs(sum(weight * (a - b) for weight, a, b in pairs))

    release = min(releases.RELEASES, key=distance)
    return PatchSet.load(release.version, release.series)


def require(version: str, read: Read) -> PatchSet:
    """The patch set for a vLLM version. Raises PatchesError on an unsupported one,
    with a report of how far the nearest release's series applies."""
    if patch_set := find(version):
        return patch_set
    near = nearest(version)
    raise PatchesError(
        f"vLLM {version} is not supported; the nearest supported release is "
        f"{near.version}: install that, or `export --release {near.version}` its "
        "patches and port them",
        near.report(read),
    )


def overlay_patch(patch_set: PatchSet) -> str:
    """The overlay as a mail that `git am` takes, from the series' first author."""
    headers = HeaderParser().parsestr(patch_set.patches[0].text)
    lines = [
        "From " + "0" * 40 + " Mon Sep 17 00:00:00 2001",
        "From: " + " ".join(headers["From"].split()),
        f"Date: {headers['Date']}",
        "Subject: [PATCH] Add the files that the series wires in",
        "",
        "---",
    ]
    for path, data in patch_set.overlay.items():
        added = data.decode().removesuffix("\n").split("\n")
        lines += [
            f"diff --git a/{path} b/{path}",
            "new file mode 100644",
            "--- /dev/null",
            f"+++ b/{path}",
            f"@@ -0,0 +1,{len(added)} @@",
            *("+" + line for line in added),
        ]
    return "\n".join(lines) + "\n"
