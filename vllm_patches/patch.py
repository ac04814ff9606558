"""A `git format-patch` file, applied in memory to files that may not be its own."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from vllm_patches.errors import PatchesError

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

    @property
    def where(self) -> str:
        return f"{self.path} hunk {self.number} (line {self.start + 1})"

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


def signed_off(text: str, who: str) -> str:
    """A patch's text with a Signed-off-by line at the end of its message."""
    for end in ("\n---\n", "\ndiff --git "):
        message, found, rest = text.partition(end)
        if found:
            break
    message = message.rstrip("\n")
    headers, _, body = message.partition("\n\n")
    gap = "\n" if body else "\n\n"
    return f"{message}{gap}Signed-off-by: {who}\n{found}{rest}"


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
            result = "conflict: " + "; ".join(hunk.where for hunk in self.conflicts)
        elif self.is_upstream:
            result = "already upstream"
        else:
            result = "applies with an offset" if self.is_moved else "applies"
        return f"{self.patch.name}: {result}"


class Files:
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

    def unpatch(self, patch: Patch) -> bool:
        """Take one patch out again. Says whether its every change was there."""
        for path, hunks in patch.hunks.items():
            lines = self._of(path)
            end = len(lines)
            for hunk in reversed(hunks):
                new, size = hunk.new, len(hunk.new)
                starts = range(end - size, -1, -1)
                start = next((n for n in starts if lines[n : n + size] == new), None)
                if start is None:
                    return False
                lines[start : start + size] = hunk.old
                end = start
        return True

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

    def read(self, path: str) -> "bytes":
        """A file's bytes as they are now, none where there is no file."""
        return "\n".join(self._of(path)).encode()

    def replace(self, path: str, data: "bytes") -> None:
        """Put other bytes in a file's place."""
        self._lines[path] = data.decode().split("\n")

    def bytes(self) -> dict[str, bytes]:
        return {path: "\n".join(lines).encode() for path, lines in self._lines.items()}
