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
from vllm_patches.target import Mismatch, Target, digest, file_digest, with_files

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
def locked(target: Target) -> Iterator[None]:
    """Hold the vLLM's lock. Raises Busy if another process does.

    The folder itself is locked, so no lock file is left behind, and the system lets
    go when the process dies."""
    handle = os.open(target.dist_info or target.root / "vllm", os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                f"another vllm-patches is at work on {target.root}; wait for it to "
                "end, then try again"
            ) from None
        yield
    finally:
        os.close(handle)


def state_folder(target: Target) -> Path:
    """Where the journal and the originals are kept."""
    return (target.dist_info or target.root) / (
        "vllm_patches" if target.dist_info else ".vllm_patches"
    )


def original(target: Target, path: str) -> Path:
    """Where a modified file's original is kept. The suffix keeps compilers away."""
    return state_folder(target) / "old" / f"{path}.orig"


def _staged(target: Target, path: str) -> Path:
    return state_folder(target) / "new" / f"{path}.new"


def _journal(target: Target) -> Path:
    return state_folder(target) / "journal.json"


def _fresh_journal(target: Target) -> Path:
    return state_folder(target) / "journal.tmp"


def read_journal(target: Target) -> Journal | None:
    """The journal, None if the vLLM is as installed. Raises PatchesError on a journal
    that nobody can read or that RECORD lists but is not there."""
    try:
        document = json.loads(_journal(target).read_bytes())
        document["files"] = {path: tuple(v) for path, v in document["files"].items()}
        return Journal(**document)
    except FileNotFoundError:
        name = _journal(target).relative_to(target.root).as_posix()
        if not target.record or f"{name},".encode() not in target.record.read_bytes():
            return None
    except (ValueError, TypeError, KeyError):
        pass
    raise PatchesError(
        f"{_journal(target)} is lost or damaged; reinstall {target.name} "
        f"{target.version}"
    )


def interrupted(target: Target) -> str | None:
    """What a run that died was doing, "apply" or "revert"; None if none did."""
    journal = read_journal(target)
    if journal is None:
        return APPLY if state_folder(target).exists() else None
    if journal.phase == PATCHED:
        return REVERT if _fresh_journal(target).exists() else None
    return journal.phase


def recover(target: Target) -> str | None:
    """Put the old tree back if a run died. Gives what it was doing."""
    was = interrupted(target)
    if was:
        restore(target)
    return was


def swap(
    target: Target,
    files: Mapping[str, bytes],
    release: str,
    series: list[str],
    contract: int | None,
) -> None:
    """Write these files, all or none. Raises OSError with the old tree in place."""
    journal = _stage(target, files, Journal(APPLY, release, series, contract, {}))
    _write_journal(target, journal)
    try:
        for path in journal.files:
            place = target.root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(_staged(target, path), place)
            _purge(place)
        shutil.rmtree(state_folder(target) / "new")
        _sync_folders(target, journal.files)
        _write_journal(target, replace(journal, phase=PATCHED))
    except BaseException:
        restore(target)
        raise


def restore(target: Target) -> None:
    """Put the old tree back, byte for byte, from any moment of `swap` or of this.
    Raises PatchesError, nothing changed, if a file is neither the old nor the new."""
    journal = read_journal(target)
    if journal is None:  # nothing was swapped yet
        shutil.rmtree(state_folder(target))
        return
    for path, (old, new) in journal.files.items():
        place, kept = target.root / path, original(target, path)
        now = _hash(place)
        if now not in (old, new, None) and new != ANY:
            raise PatchesError(
                f"{place} was edited after apply; save and undo the edit "
                f"({'its original is ' + str(kept) if old else 'or delete it'})"
                f", or reinstall {target.name}"
            )
        if now != old and old and _hash(kept) != old:
            raise PatchesError(f"{kept} is lost or damaged; reinstall {target.name}")
    _check_writable(target, journal.files)
    if journal.phase == PATCHED:
        _write_journal(target, replace(journal, phase=REVERT))
    for path, (old, _) in reversed(journal.files.items()):
        place = target.root / path
        if old and _hash(place) != old:
            os.replace(original(target, path), place)
        elif not old and place.is_file():
            place.unlink()
        _purge(place)
        if old is None:
            _prune(place.parent, target.root)
    _sync_folders(target, journal.files)
    for name in ("new", "old"):
        if (state_folder(target) / name).exists():
            shutil.rmtree(state_folder(target) / name)
    _fresh_journal(target).unlink(missing_ok=True)
    _journal(target).unlink()
    state_folder(target).rmdir()


def mismatches(target: Target, journal: Journal) -> list[Mismatch]:
    """The files that are not as `swap` wrote them."""
    found = {path: _hash(target.root / path) for path in journal.files}
    return [
        Mismatch(path, "changed" if found[path] else "missing")
        for path, (_, new) in journal.files.items()
        if new not in (found[path], ANY)
    ]


def _stage(target: Target, files: Mapping[str, bytes], journal: Journal) -> Journal:
    """Fill the state folder, without the journal. Gives the journal to write."""
    names = sorted(files, key=lambda path: (target.root / path).exists())  # new first
    after = {path: files[path] for path in names}
    before = {
        path: target.read(path) for path in names if (target.root / path).exists()
    }
    changes: dict[str, tuple[str | None, str | None]] = {
        path: (digest(before[path]) if path in before else None, digest(data))
        for path, data in after.items()
    }
    if target.record:
        record = target.record.relative_to(target.root).as_posix()
        before[record] = target.read(record)
        changes = {record: (digest(before[record]), ANY)} | changes
        journal = replace(journal, files=changes)
        state = {original(target, path): data for path, data in before.items()}
        state[_journal(target)] = replace(journal, phase=PATCHED).encode()
        listed = {
            path.relative_to(target.root).as_posix(): data
            for path, data in state.items()
        }
        after[record] = with_files(before[record], after | listed)
    journal = replace(journal, files=changes)

    _check_writable(target, [*after, state_folder(target).relative_to(target.root)])
    try:
        for path in before:
            kept = original(target, path)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(target.root / path, kept)
            _sync(kept)
        for path, data in after.items():
            staged = _staged(target, path)
            staged.parent.mkdir(parents=True, exist_ok=True)
            _write(staged, data)
            if path in before:
                shutil.copymode(target.root / path, staged)
        copies = {original(target, path): data for path, data in before.items()}
        copies |= {_staged(target, path): data for path, data in after.items()}
        for copy, data in copies.items():
            if _hash(copy) != digest(data):
                raise OSError(f"{copy} does not read back as written")
            _sync(copy.parent)
    except BaseException:
        shutil.rmtree(state_folder(target), ignore_errors=True)
        raise
    return journal


def _write_journal(target: Target, journal: Journal) -> None:
    fresh = _fresh_journal(target)
    try:
        _write(fresh, journal.encode())
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    os.replace(fresh, _journal(target))
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


def _sync_folders(target: Target, paths: Iterable[str]) -> None:
    for folder in {(target.root / path).parent for path in paths}:
        if folder.exists():
            _sync(folder)


def _hash(path: Path) -> str | None:
    found = file_digest(path)
    return found[0] if found else None


def _check_writable(target: Target, paths: Iterable[str | Path]) -> None:
    """Raises PatchesError if a folder that must change is read-only."""
    for path in paths:
        folder = (target.root / path).parent
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
