"""A release's patches and the overlay, applied in memory."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cached_property
from pathlib import Path

from packaging.version import Version

from vllm_patches import releases
from vllm_patches.errors import PatchesError

OVERLAY = Path(__file__).parent / "overlay"
CONTRACT = re.compile(rb"^CONTRACT_VERSION = (\d+)$", re.MULTILINE)

FILE = re.compile(r"diff --git a/(.+) b/(.+)")
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
OTHER = re.compile(
    r"(new|deleted) file|(rename|copy) from|Binary|GIT binary|old mode|\\"
)

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
        does more than modify lines of files."""
        files: dict[str, list[Hunk]] = {}
        path = None
        lines = iter(self.text.split("\n"))
        for line in lines:
            if file := FILE.fullmatch(line):
                path = file[2]
                files[path] = []
            elif path and OTHER.match(line):
                raise PatchesError(
                    f"{self.name} does more to {path} than to modify it; a patch may "
                    "only modify files: put new ones into the overlay"
                )
            elif path and (header := HUNK.match(line)):
                start, old, new = (int(group or 1) for group in header.groups())
                hunk = Hunk(path, len(files[path]) + 1, start - bool(old), [], [])
                while len(hunk.old) < old or len(hunk.new) < new:
                    line = next(lines, "")
                    if line[:1] not in (" ", "-", "+") or not line:
                        raise PatchesError(f"{self.name} is damaged; write it anew")
                    if line[0] != "+":
                        hunk.old.append(line[1:])
                    if line[0] != "-":
                        hunk.new.append(line[1:])
                files[path].append(hunk)
        return files


@dataclass(frozen=True)
class PatchSet:
    """What is done to a release: its series and the overlay."""

    version: str
    patches: list[Patch]
    overlay: dict[str, bytes]
    """New files, by their path relative to the root."""

    @classmethod
    def load(cls, version: str, folder: Path) -> "PatchSet":
        """Read a series' folder and the overlay."""
        patches = [
            Patch(path.name, path.read_bytes().decode())
            for path in sorted(folder.glob("*.patch"))
        ]
        if not patches:
            raise PatchesError(f"no patches in {folder}; reinstall vllm-logical-blocks")
        files = {
            path.relative_to(OVERLAY).as_posix(): path.read_bytes()
            for path in sorted(OVERLAY.rglob("*"))
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

    def port(self, read: Read) -> list["Outcome"]:
        """How each patch fares on files that it was not made for. Hunks are searched
        for near their lines, and a patch applies wholly or not at all, as in git."""
        files = _Files(read)
        return [files.port(patch) for patch in self.patches]

    def report(self, read: Read) -> list[str]:
        """One line per patch: its outcome on these files."""
        return [str(outcome) for outcome in self.port(read)]


@dataclass(frozen=True)
class Outcome:
    """How a patch fares on files that it was not made for."""

    patch: Patch
    conflicts: list[Hunk]
    """Hunks that match nowhere; the patch does not apply."""
    is_upstream: bool
    """Whether the files have every one of its changes."""
    is_moved: bool
    """Whether a hunk applies at another line."""

    @property
    def applies(self) -> bool:
        """Whether the patch changes the files."""
        return not self.conflicts and not self.is_upstream

    def __str__(self) -> str:
        if self.conflicts:
            result = "conflict: " + "; ".join(map(_where, self.conflicts))
        elif self.is_upstream:
            result = "already upstream"
        else:
            result = "applies with an offset" if self.is_moved else "applies"
        return f"{self.patch.name}: {result}"


def _where(hunk: Hunk) -> str:
    return f"{hunk.path} hunk {hunk.number} (line {hunk.start + 1})"


class _Files:
    """Files under a series, kept as lines without their ends."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._lines: dict[str, list[str]] = {}

    def _of(self, path: str) -> list[str]:
        if path not in self._lines:
            try:
                self._lines[path] = self._read(path).decode().split("\n")
            except (OSError, KeyError):
                self._lines[path] = []
        return self._lines[path]

    def patch(
        self, path: str, hunks: list[Hunk], search: bool
    ) -> list[tuple[Hunk, int | None]]:
        """Apply one file's hunks. Gives each with its offset in lines, None where it
        does not match; with `search`, the nearest place that matches counts."""
        lines = self._of(path)
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

    def port(self, patch: Patch) -> Outcome:
        """Apply one patch, or leave the lines as they are."""
        before = {path: list(lines) for path, lines in self._lines.items()}
        results = [
            result
            for path, hunks in patch.hunks.items()
            for result in self.patch(path, hunks, search=True)
        ]
        conflicts = [hunk for hunk, offset in results if offset is None]
        if conflicts:
            self._lines = before
            if len(conflicts) == len(results) and all(map(self._has, conflicts)):
                return Outcome(patch, [], is_upstream=True, is_moved=False)
        moved = any(offset for _, offset in results)
        return Outcome(patch, conflicts, is_upstream=False, is_moved=moved)

    def _has(self, hunk: Hunk) -> bool:
        lines = self._of(hunk.path)
        starts = range(len(lines) - len(hunk.new) + 1)
        return any(lines[n : n + len(hunk.new)] == hunk.new for n in starts)

    def bytes(self) -> dict[str, bytes]:
        return {path: "\n".join(lines).encode() for path, lines in self._lines.items()}


def contract_version(files: Iterable[bytes]) -> int | None:
    """The `CONTRACT_VERSION` that one of the files sets, None where none does."""
    for data in files:
        if match := CONTRACT.search(data):
            return int(match[1])
    return None


def find(version: str) -> PatchSet | None:
    """The patch set for a vLLM version, its local tag aside; None where there is
    none."""
    release = releases.find(version)
    return PatchSet.load(release.version, release.series) if release else None


def nearest(version: str) -> PatchSet:
    """The patch set of the supported release nearest to a version."""

    def rank(text: str) -> int:
        number = Version(text)
        return 1_000_000 * number.major + 1_000 * number.minor + number.micro

    def distance(release: releases.Release) -> int:
        return abs(rank(release.version) - rank(version))

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
        lines += [f"diff --git a/{path} b/{path}", "new file mode 100644"]
        if not data:
            lines += ["index 0000000..e69de29"]  # git's name of an empty file
            continue
        added = data.decode().removesuffix("\n").split("\n")
        lines += ["--- /dev/null", f"+++ b/{path}", f"@@ -0,0 +1,{len(added)} @@"]
        lines += ["+" + line for line in added]
    return "\n".join(lines) + "\n"
