"""Changes many files of a vLLM at once, or none.

The state folder keeps the originals and a journal. It lies in the dist-info, where
RECORD lists it, or beside `vllm/` in a tree without one. Whatever moment a run dies at,
the journal and the originals are enough to put the old tree back:

1. stage: originals copied, new files written, all flushed, every hash checked;
2. journal, phase "apply";
3. swap, one rename a file: RECORD first, so that it never misses a file, then the new
   files, which nothing imports yet, then the modified ones;
4. journal, phase "patched".

A revert sets the phase "revert" and goes back in the opposite order. A run that died
before 2 changed nothing; one that died later is undone by the next.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vllm_patches.errors import PatchesError
from vllm_patches.installation import Installation, Mismatch
from vllm_patches.record import Record, digest, file_digest, lists

APPLY, PATCHED, REVERT = "apply", "patched", "revert"
"""The journal's phases."""
ANY = "any"
"""In place of RECORD's hash after the swap: RECORD holds the journal's own hash."""


@dataclass(frozen=True)
class Journal:
    """What was, is being or is being un-done to a vLLM."""

    phase: str
    release: str
    series: list[str]
    contract: int | None
    files: dict[str, tuple[str | None, str | None]]
    """Path -> (hash before, hash after), None for no file, in the swap's order."""

    def encode(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


class Busy(PatchesError):
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(installation: Installation) -> Iterator[None]:
    """Hold the vLLM's lock. Raises Busy if another process does.

    The folder itself is locked, so no lock file is left behind, and the system lets
    go when the process dies."""
    handle = os.open(installation.dist_info or installation.root / "vllm", os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                f"another vllm-patches is at work on {installation.root}; wait for it "
                "to end, then try again"
            ) from None
        yield
    finally:
        os.close(handle)


def state_folder(installation: Installation) -> Path:
    """Where the journal and the originals are kept."""
    return (installation.dist_info or installation.root) / (
        "vllm_patches" if installation.dist_info else ".vllm_patches"
    )


def original(installation: Installation, path: str) -> Path:
    """Where a modified file's original is kept. The suffix keeps compilers away."""
    return state_folder(installation) / "old" / f"{path}.orig"


def _staged(installation: Installation, path: str) -> Path:
    return state_folder(installation) / "new" / f"{path}.new"


def _journal(installation: Installation) -> Path:
    return state_folder(installation) / "journal.json"


def _fresh_journal(installation: Installation) -> Path:
    return state_folder(installation) / "journal.tmp"


def read_journal(installation: Installation) -> Journal | None:
    """The journal, None if the vLLM is as installed. Raises PatchesError on a journal
    that nobody can read or that RECORD lists but is not there."""
    try:
        document = json.loads(_journal(installation).read_bytes())
        document["files"] = {path: tuple(v) for path, v in document["files"].items()}
        return Journal(**document)
    except FileNotFoundError:
        name = _journal(installation).relative_to(installation.root).as_posix()
        record = installation.record
        if not record or not lists(record.read_bytes(), name):
            return None
    except (ValueError, TypeError, KeyError):
        pass
    raise PatchesError(
        f"{_journal(installation)} is lost or damaged; reinstall {installation.name} "
        f"{installation.version}"
    )


def interrupted(installation: Installation) -> str | None:
    """What a run that died was doing, "apply" or "revert"; None if none did."""
    journal = read_journal(installation)
    if journal is None:
        return APPLY if state_folder(installation).exists() else None
    if journal.phase == PATCHED:
        return REVERT if _fresh_journal(installation).exists() else None
    return journal.phase


def swap(
    installation: Installation,
    files: Mapping[str, bytes],
    release: str,
    series: list[str],
    contract: int | None,
) -> None:
    """Write these files, all or none. Raises OSError with the old tree in place."""
    journal = _stage(installation, files, Journal(APPLY, release, series, contract, {}))
    _write_journal(installation, journal)
    try:
        for path in journal.files:
            place = installation.root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(_staged(installation, path), place)
            _purge(place)
        shutil.rmtree(state_folder(installation) / "new")
        _sync_folders(installation, journal.files)
        _write_journal(installation, replace(journal, phase=PATCHED))
    except BaseException:
        restore(installation)
        raise


def restore(installation: Installation) -> None:
    """Put the old tree back, byte for byte, from any moment of `swap` or of this.
    Raises PatchesError, nothing changed, if a file is neither the old nor the new."""
    journal = read_journal(installation)
    if journal is None:  # nothing was swapped yet
        shutil.rmtree(state_folder(installation))
        return
    for path, (old, new) in journal.files.items():
        place, kept = installation.root / path, original(installation, path)
        now = file_digest(place)
        if now not in (old, new, None) and new != ANY:
            raise PatchesError(
                f"{place} was edited after apply; save and undo the edit "
                f"({'its original is ' + str(kept) if old else 'or delete it'})"
                f", or reinstall {installation.name}"
            )
        if now != old and old and file_digest(kept) != old:
            raise PatchesError(
                f"{kept} is lost or damaged; reinstall {installation.name}"
            )
    _check_writable(installation, journal.files)
    if journal.phase == PATCHED:
        _write_journal(installation, replace(journal, phase=REVERT))
    for path, (old, _) in reversed(journal.files.items()):
        place = installation.root / path
        if old and file_digest(place) != old:
            os.replace(original(installation, path), place)
        elif not old and place.is_file():
            place.unlink()
        _purge(place)
        if old is None:
            _prune(place.parent, installation.root)
    _sync_folders(installation, journal.files)
    for name in ("new", "old"):
        if (state_folder(installation) / name).exists():
            shutil.rmtree(state_folder(installation) / name)
    _fresh_journal(installation).unlink(missing_ok=True)
    _journal(installation).unlink()
    state_folder(installation).rmdir()


def mismatches(installation: Installation, journal: Journal) -> list[Mismatch]:
    """The files that are not as `swap` wrote them."""
    found = {path: file_digest(installation.root / path) for path in journal.files}
    return [
        Mismatch(path, "changed" if found[path] else "missing")
        for path, (_, new) in journal.files.items()
        if new not in (found[path], ANY)
    ]


def _stage(
    installation: Installation, files: Mapping[str, bytes], journal: Journal
) -> Journal:
    """Fill the state folder, without the journal. Gives the journal to write."""
    names = sorted(
        files, key=lambda path: (installation.root / path).exists()
    )  # new first
    after = {path: files[path] for path in names}
    before = {
        path: installation.read(path)
        for path in names
        if (installation.root / path).exists()
    }
    changes: dict[str, tuple[str | None, str | None]] = {
        path: (digest(before[path]) if path in before else None, digest(data))
        for path, data in after.items()
    }
    if installation.record:
        record = installation.record.relative_to(installation.root).as_posix()
        before[record] = installation.read(record)
        changes = {record: (digest(before[record]), ANY)} | changes
        journal = replace(journal, files=changes)
        state = {original(installation, path): data for path, data in before.items()}
        state[_journal(installation)] = replace(journal, phase=PATCHED).encode()
        listed = {
            path.relative_to(installation.root).as_posix(): data
            for path, data in state.items()
        }
        rows = Record.parse(before[record], installation)
        after[record] = rows.with_files(after | listed).encode()
    journal = replace(journal, files=changes)

    _check_writable(
        installation,
        [*after, state_folder(installation).relative_to(installation.root)],
    )
    try:
        for path in before:
            kept = original(installation, path)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(installation.root / path, kept)
            _sync(kept)
        for path, data in after.items():
            staged = _staged(installation, path)
            staged.parent.mkdir(parents=True, exist_ok=True)
            _write(staged, data)
            if path in before:
                shutil.copymode(installation.root / path, staged)
        copies = {original(installation, path): data for path, data in before.items()}
        copies |= {_staged(installation, path): data for path, data in after.items()}
        for copy, data in copies.items():
            if file_digest(copy) != digest(data):
                raise OSError(f"{copy} does not read back as written")
            _sync(copy.parent)
    except BaseException:
        shutil.rmtree(state_folder(installation), ignore_errors=True)
        raise
    return journal


def _write_journal(installation: Installation, journal: Journal) -> None:
    fresh = _fresh_journal(installation)
    try:
        _write(fresh, journal.encode())
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    os.replace(fresh, _journal(installation))
    _sync(fresh.parent)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_folders(installation: Installation, paths: Iterable[str]) -> None:
    for folder in {(installation.root / path).parent for path in paths}:
        if folder.exists():
            _sync(folder)


def _check_writable(installation: Installation, paths: Iterable[str | Path]) -> None:
    """Raises PatchesError if a folder that must change is read-only."""
    for path in paths:
        folder = (installation.root / path).parent
        while not folder.is_dir():
            folder = folder.parent
        for place in (folder, folder / "__pycache__"):
            if place.exists() and not os.access(place, os.W_OK | os.X_OK):
                raise PatchesError(
                    f"{place} is read-only for you; run as the user who owns it, or "
                    "install a patched wheel instead (vllm-patches wheel)"
                )


def _purge(place: Path) -> None:
    """Remove what Python compiled from a file that changed."""
    for compiled in (place.parent / "__pycache__").glob(f"{place.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _prune(folder: Path, root: Path) -> None:
    """Remove the folders that a removed file leaves empty."""
    for place in (folder / "__pycache__", folder, *folder.parents):
        if place == root or (place.is_dir() and any(place.iterdir())):
            return
        if place.is_dir():
            place.rmdir()
