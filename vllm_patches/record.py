"""RECORD, a distribution's list of its files: read and written here alone."""

import base64
import csv
import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from installer.records import Hash, InvalidRecordEntry, RecordEntry

from vllm_patches.errors import PatchesError

CHUNK = 1 << 20
"""Bytes read at a time."""


@dataclass(frozen=True)
class Record:
    """The rows of a RECORD."""

    entries: dict[str, RecordEntry]
    """By path, in the file's order."""
    end: str = "\n"
    """How its lines end."""

    @classmethod
    def parse(cls, data: bytes, where: object) -> "Record":
        """Read a RECORD's bytes; hash and size may be left out, as pip takes it.
        Raises PatchesError, saying where it is, on rows that are none."""
        try:
            entries = {}
            text = io.StringIO(data.decode(), newline="")
            for row in csv.reader(line for line in text if line.strip()):
                path, hash_, size = (*row, "", "")[: max(3, len(row))]
                path = path.replace("\\", "/")
                entries[path] = RecordEntry.from_elements(path, hash_, size)
        except (InvalidRecordEntry, ValueError, csv.Error) as error:
            raise PatchesError(
                f"RECORD of {where} is damaged ({error}); get that release anew"
            ) from None
        return cls(entries, "\r\n" if b"\r\n" in data else "\n")

    def encode(self) -> bytes:
        """The bytes to write."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator=self.end)
        writer.writerows(entry.to_row() for entry in self.entries.values())
        return text.getvalue().encode()

    def with_files(self, files: Mapping[str, bytes]) -> "Record":
        """The same with the rows of these files updated, or added before its own."""
        new = {
            path: RecordEntry(path, Hash.parse(digest(data)), len(data))
            for path, data in files.items()
        }
        last = {p: e for p, e in self.entries.items() if p.endswith("/RECORD")}
        rest = {p: e for p, e in self.entries.items() if p not in last}
        return replace(self, entries=rest | new | last)

    def only(self, keep: Callable[[str], bool]) -> "Record":
        """The same without the rows whose path is not to be kept."""
        entries = {path: e for path, e in self.entries.items() if keep(path)}
        return replace(self, entries=entries)

    def renamed(self, rename: Callable[[str], str]) -> "Record":
        """The same with other paths."""
        entries = [replace(e, path=rename(e.path)) for e in self.entries.values()]
        return replace(self, entries={entry.path: entry for entry in entries})


def lists(data: bytes, path: str) -> bool:
    """Whether a RECORD has a row for a path; fast, and whatever else it holds."""
    return f"\n{path},".encode() in b"\n" + data


def digest(data: bytes) -> str:
    """The hash of some bytes as RECORD writes it."""
    return _written(stream_sha256(io.BytesIO(data)))


def file_digest(path: Path) -> str | None:
    """A file's hash as RECORD writes it; None if there is no such file."""
    try:
        with path.open("rb") as file:
            return _written(stream_sha256(file))
    except (FileNotFoundError, NotADirectoryError):
        return None


def stream_sha256(stream: BinaryIO) -> bytes:
    """The SHA-256 of all that is left to read."""
    sha256 = hashlib.sha256()
    while chunk := stream.read(CHUNK):
        sha256.update(chunk)
    return sha256.digest()


def _written(sha256: bytes) -> str:
    value = base64.urlsafe_b64encode(sha256).rstrip(b"=")
    return str(Hash("sha256", value.decode()))
