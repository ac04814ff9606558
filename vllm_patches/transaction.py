"""Changes many files of a vLLM at once, or none.

The state folder, `.vllm_patches` beside `vllm/`, keeps the originals and a journal;
RECORD lists both, so that pip removes them with vLLM. Whatever moment a run dies at,
the journal and the copies are enough to put the old tree back:

1. stage: originals copied, new files written, all flushed, every hash checked;
2. journal, phase "apply";
3. swap, one rename a file: RECORD first, so that it never misses a file, then the new
   files, which nothing imports yet, then the modified ones;
4. journal, phase "patched".

A revert marks itself by an empty `journal.tmp`, which a full disk still takes, and goes
back in the opposite order. An update is an apply whose old tree is a patched one, kept
below `prev`; its journal, phase "update", holds the one it began with. A run that died
before 2 changed nothing; one that died later is undone by the next. While RECORD does
not list the journal no other file is changed: state that it does not list is cleared.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from vllm_patches.errors import PatchesError
from vllm_patches.installation import OWNED, Installation, Mismatch
from vllm_patches.record import Record, digest, file_digest, lists

APPLY, PATCHED, UPDATE, REVERT = "apply", "patched", "update", "revert"
"""The journal's phases."""
LEFTOVER = "leftover"
"""State that belongs to no vLLM that is here."""
ANY = "any"
"""In place of RECORD's hash after the swap: RECORD holds the journal's own hash."""
CANNOT_LOCK = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}
"""What a file system says that cannot lock a folder, as some NFS."""

Changes = dict[str, tuple[str | None, str | None]]
"""Path -> (hash before, hash after), None for no file, in the swap's order."""


@dataclass(frozen=True)
class Journal:
    """What was, is being or is being un-done to a vLLM."""

    phase: str
    release: str
    series: list[str]
    contract: int | None
    files: Changes = field(default_factory=dict)
    """From the tree as installed to the patched one."""
    tool: str | None = None
    """The version of this project that patched it; None before 0.3.0."""
    digest: str | None = None
    """The patch set's."""
    update: Changes | None = None
    """In phase "update": from one patched tree to the other."""
    previous: str | None = None
    """In phase "update": the journal that it began with, as it was written."""

    def encode(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> "Journal":
        """Raises ValueError, TypeError or KeyError on what is none. What a newer tool
        added is left out."""
        document = dict(json.loads(data))
        for name in ("files", "update"):
            if document.get(name) is not None:
                document[name] = {p: tuple(v) for p, v in document[name].items()}
        document["files"]  # noqa: B018
        known = {each.name for each in fields(cls)}
        return cls(**{name: v for name, v in document.items() if name in known})


class Busy(PatchesError):
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(installation: Installation, shared: bool = False) -> Iterator[None]:
    """Hold the vLLM's lock, shared by those who only read. Raises Busy if another
    process holds it otherwise.

    The folder itself is locked, so no lock file is left behind, and the system lets
    go when the process dies."""
    place = installation.dist_info or installation.root / "vllm"
    handle = os.open(place, os.O_RDONLY)
    try:
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                f"another vllm-patches is at work on {installation.root}; wait for it "
                "to end, then try again",
                code="busy",
            ) from None
        except OSError as error:
            if error.errno not in CANNOT_LOCK:
                raise
            if not shared:
                raise PatchesError(
                    f"the file system of {place} cannot lock a folder "
                    f"({error.strerror}); install a patched wheel there instead "
                    "(vllm-patches wheel)"
                ) from None
        yield
    finally:
        os.close(handle)


def state_folder(installation: Installation) -> Path:
    """Where the journal and the originals are kept. Up to 0.2.0 it was in the
    dist-info."""
    if installation.dist_info:
        old = installation.dist_info / "vllm_patches"
        if old.exists():
            return old
    return installation.root / ".vllm_patches"


def original(installation: Installation, path: str) -> Path:
    """Where a modified file's original is kept. The suffix keeps compilers away."""
    return state_folder(installation) / "old" / f"{path}.orig"


def _previous(installation: Installation, path: str) -> Path:
    """Where an update keeps what it replaces."""
    return state_folder(installation) / "prev" / f"{path}.prev"


def _staged(installation: Installation, path: str) -> Path:
    return state_folder(installation) / "new" / f"{path}.new"


def _journal(installation: Installation) -> Path:
    return state_folder(installation) / "journal.json"


def _fresh_journal(installation: Installation) -> Path:
    return state_folder(installation) / "journal.tmp"


def _is_listed(installation: Installation) -> bool:
    """Whether the vLLM that is here knows of the state, if there is any."""
    if not installation.record:
        return True
    name = _journal(installation).relative_to(installation.root).as_posix()
    return lists(installation.record.read_bytes(), name)


def read_journal(installation: Installation) -> Journal | None:
    """The journal, None if the vLLM is as installed. Raises PatchesError on a journal
    that nobody can read or that RECORD lists but is not there."""
    if not _is_listed(installation):
        return None
    try:
        return Journal.decode(_journal(installation).read_bytes())
    except FileNotFoundError:
        if not installation.record:
            return None
    except (ValueError, TypeError, KeyError):
        pass
    state = state_folder(installation)
    raise PatchesError(
        f"{_journal(installation)} is lost or damaged; reinstall {installation.name} "
        f"{installation.version}"
        if installation.record
        else f"{_journal(installation)} is damaged; put the files below "
        f"{state / 'old'} back or unpack the tree anew, and remove {state}"
    )


def interrupted(installation: Installation) -> str | None:
    """What a run that died was doing, "apply", "update" or "revert", or "leftover";
    None if nothing is left of any."""
    journal = read_journal(installation)
    state = state_folder(installation)
    if journal is None:
        if not state.exists():
            return None
        return APPLY if _began_here(installation) else LEFTOVER
    if journal.phase == PATCHED:
        if (state / "new").exists() or (state / "prev").exists():
            return UPDATE
        return REVERT if _fresh_journal(installation).exists() else None
    return journal.phase


def _began_here(installation: Installation) -> bool:
    """Whether state that RECORD does not list was made for this very vLLM."""
    try:
        journal = Journal.decode(_journal(installation).read_bytes())
    except FileNotFoundError:
        return True
    except (ValueError, TypeError, KeyError):
        return False
    assert installation.record
    record = installation.record.relative_to(installation.root).as_posix()
    before, _ = journal.files.get(record, (None, None))
    return before == file_digest(installation.record)


def swap(
    installation: Installation,
    files: Mapping[str, bytes],
    head: Journal,
    dry_run: bool = False,
) -> None:
    """Make these the patched files, all or none; files that were patched before and
    are not among them become as installed. `head` says what is done. Raises OSError
    with the old tree in place."""
    old = read_journal(installation)
    journal, before, after = _plan(installation, files, head, old)
    _check_places(installation, before)
    if dry_run:
        return
    steps = journal.update or journal.files
    try:
        _stage(installation, journal, before, after)
    except BaseException:
        _discard(installation)
        raise
    _write_journal(installation, journal.encode())
    try:
        for path, (_, new) in steps.items():
            place = installation.root / path
            if new is None:
                place.unlink(missing_ok=True)
                _prune(place.parent, installation.root)
            else:
                _make_folder(place.parent)
                os.replace(_staged(installation, path), place)
            _purge(place)
        shutil.rmtree(state_folder(installation) / "new")
        _sync_folders(installation, steps)
        _write_journal(installation, _finished(journal).encode())
        _tidy(installation)
    except BaseException:
        restore(installation)
        raise


def _finished(journal: Journal) -> Journal:
    return replace(journal, phase=PATCHED, update=None, previous=None)


def restore(installation: Installation, dry_run: bool = False) -> None:
    """Put the old tree back, byte for byte, from any moment of `swap` or of this: the
    one before the update, if one died, else the one that was installed.

    Raises PatchesError, nothing changed, if a file is neither the old nor the new."""
    journal = read_journal(installation)
    was = interrupted(installation)
    if journal is None:  # nothing was swapped yet
        if not dry_run:
            _clear(installation)
        return
    if was == UPDATE and journal.phase == PATCHED:  # not begun, or finished
        if not dry_run:
            _tidy(installation)
        return
    steps = journal.update or journal.files
    kept = _previous if journal.update else original
    for path, (old, new) in steps.items():
        place = installation.root / path
        now = file_digest(place)
        copy = kept(installation, path)
        if now not in (old, new, None) and new != ANY:
            raise PatchesError(
                f"{place} was edited after apply; save and undo the edit "
                f"({f'its original is {copy}' if old else 'or delete it'}), or "
                f"reinstall {installation.name}",
                code="changed",
            )
        if now != old and old and file_digest(copy) != old:
            raise PatchesError(
                f"{copy} is lost or damaged; reinstall {installation.name}"
            )
    _check_places(installation, steps)
    if dry_run:
        return
    if journal.phase == PATCHED:
        _fresh_journal(installation).touch()
        _sync(state_folder(installation))
    for path, (old, _) in reversed(steps.items()):
        place = installation.root / path
        if old and file_digest(place) != old:
            _make_folder(place.parent)
            os.replace(kept(installation, path), place)
        elif not old and place.is_file():
            place.unlink()
        _purge(place)
        if old is None:
            _prune(place.parent, installation.root)
    _sync_folders(installation, steps)
    if journal.previous:
        _write_journal(installation, journal.previous.encode())
        _tidy(installation)
        return
    for name in ("new", "old"):
        if (state_folder(installation) / name).exists():
            shutil.rmtree(state_folder(installation) / name)
    _journal(installation).unlink()
    _fresh_journal(installation).unlink(missing_ok=True)
    state_folder(installation).rmdir()


def mismatches(installation: Installation, journal: Journal) -> list[Mismatch]:
    """The files that are not as `swap` wrote them."""
    found = {path: file_digest(installation.root / path) for path in journal.files}
    return [
        Mismatch(path, "changed" if found[path] else "missing")
        for path, (_, new) in journal.files.items()
        if new not in (found[path], ANY)
    ]


def pristine(installation: Installation, path: str) -> bytes:
    """A file's bytes as installed. Raises FileNotFoundError if there was none."""
    journal = read_journal(installation)
    if journal is None or path not in journal.files:
        return installation.read(path)
    if journal.files[path][0] is None:
        raise FileNotFoundError(path)
    return original(installation, path).read_bytes()


def _plan(
    installation: Installation,
    files: Mapping[str, bytes],
    head: Journal,
    old: Journal | None,
) -> tuple[Journal, dict[str, bytes | None], dict[str, bytes | None]]:
    """The journal to write, and what is and what is to be at every path that changes,
    in the swap's order."""
    root = installation.root
    touched = dict.fromkeys([*files, *(old.files if old else ())])
    record = installation.record and installation.record.relative_to(root).as_posix()
    touched.pop(record or "", None)

    def installed(path: str) -> bytes | None:
        try:
            return pristine(installation, path)
        except FileNotFoundError:
            return None

    was = {path: installed(path) for path in touched}
    after: dict[str, bytes | None] = {p: files.get(p, was[p]) for p in touched}
    # First those that are new, last those that go.
    names = sorted(
        touched, key=lambda path: (after[path] is None, was[path] is not None)
    )
    changes: Changes = {
        p: (_hash(was[p]), _hash(after[p])) for p in names if p in files
    }
    before = {path: _present(root / path) for path in names}
    after = {path: after[path] for path in names}
    if record:
        was[record] = pristine(installation, record)
        changes = {record: (_hash(was[record]), ANY)} | changes
    journal = replace(head, files=changes)
    if record:
        listed: dict[str, bytes] = {
            original(installation, path).relative_to(root).as_posix(): data
            for path in changes
            if (data := was[path]) is not None
        }
        listed[_journal(installation).relative_to(root).as_posix()] = _finished(
            journal
        ).encode()
        rows = Record.parse(was[record] or b"", installation)
        before = {record: installation.read(record), **before}
        after = {record: rows.with_files({**files, **listed}).encode(), **after}
    if old:
        update = {p: (_hash(before[p]), _hash(after[p])) for p in before}
        if record:
            update[record] = (update[record][0], ANY)
        previous = _journal(installation).read_text()
        journal = replace(journal, phase=UPDATE, update=update, previous=previous)
    return journal, before, after


def _hash(data: bytes | None) -> str | None:
    return None if data is None else digest(data)


def _present(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _stage(
    installation: Installation,
    journal: Journal,
    before: Mapping[str, bytes | None],
    after: Mapping[str, bytes | None],
) -> None:
    """Fill the state folder, without the journal."""
    root = installation.root
    copies = {}
    for path, data in after.items():
        if data is None:
            continue
        staged = _staged(installation, path)
        _make_state_folder(installation, staged.parent)
        _write(staged, data)
        _like(staged, _model(root / path))
        copies[staged] = data
    keep = {_previous: list(before)} if journal.update else {}
    keep[original] = [p for p in before if not original(installation, p).exists()]
    for kept, paths in keep.items():
        for path in paths:
            if (present := before[path]) is None or (
                kept is original and not journal.files.get(path, (None,))[0]
            ):
                continue
            copy = kept(installation, path)
            _make_state_folder(installation, copy.parent)
            shutil.copy2(root / path, copy)
            _like(copy, root / path)
            _sync(copy)
            copies[copy] = present
    for copy, data in copies.items():
        if file_digest(copy) != digest(data):
            raise OSError(f"{copy} does not read back as written")
        _sync(copy.parent)


def _discard(installation: Installation) -> None:
    """Remove what was staged."""
    if read_journal(installation):
        _tidy(installation)
    else:
        shutil.rmtree(state_folder(installation), ignore_errors=True)


def _tidy(installation: Installation) -> None:
    """Remove what an update left, not begun or finished."""
    journal, state = read_journal(installation), state_folder(installation)
    assert journal
    _fresh_journal(installation).unlink(missing_ok=True)
    needed = {
        original(installation, path) for path, (old, _) in journal.files.items() if old
    }
    for kept in (state / "old").rglob("*.orig"):
        if kept not in needed:
            kept.unlink()
            _prune(kept.parent, state)
    for name in ("prev", "new"):
        if (state / name).exists():
            shutil.rmtree(state / name)


def _clear(installation: Installation) -> None:
    """Remove state that RECORD does not list, and the new files of its journal."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        journal = Journal.decode(_journal(installation).read_bytes())
        record = installation.record.read_bytes() if installation.record else b""
        for path, (old, new) in journal.files.items():
            place = installation.root / path
            ours = old is None and new and file_digest(place) == new
            if ours and not lists(record, path):
                place.unlink()
                _purge(place)
                _prune(place.parent, installation.root)
    shutil.rmtree(state_folder(installation))


def _write_journal(installation: Installation, data: bytes) -> None:
    fresh = _fresh_journal(installation)
    try:
        _write(fresh, data)
        _like(fresh, installation.record or installation.root / OWNED)
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


def _like(path: Path, model: Path) -> None:
    """Give it another's mode, and owner where we may."""
    wanted, now = model.stat(), path.stat()
    if (wanted.st_uid, wanted.st_gid) != (now.st_uid, now.st_gid):
        with contextlib.suppress(PermissionError):
            os.chown(path, wanted.st_uid, wanted.st_gid)
    path.chmod(stat.S_IMODE(wanted.st_mode))


def _model(place: Path) -> Path:
    """Whose mode and owner a file gets: its own, or a sibling's."""
    if place.exists():
        return place
    folder = _existing(place.parent)
    siblings = (path for path in sorted(folder.glob("*.py")) if path.is_file())
    return next(siblings, None) or _model(folder.parent / "__init__.py")


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir()
        _like(folder, folder.parent)


def _make_state_folder(installation: Installation, folder: Path) -> None:
    if not folder.is_dir():
        if folder != state_folder(installation):
            _make_state_folder(installation, folder.parent)
        folder.mkdir()
        _like(folder, installation.dist_info or installation.root / "vllm")


def _existing(folder: Path) -> Path:
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _check_places(installation: Installation, paths: Iterable[str]) -> None:
    """Raises PatchesError if a place that must change is read-only, or a mount of its
    own, into which nothing can be renamed."""
    mounts = _mounts(installation.root)
    places = [installation.root / path for path in paths]
    for place in [*places, state_folder(installation)]:
        folder = _existing(place.parent)
        for each in (folder, folder / "__pycache__"):
            if each.exists() and not os.access(each, os.W_OK | os.X_OK):
                raise PatchesError(
                    f"{each} is read-only for you; run as the user who owns it, or "
                    "install a patched wheel instead (vllm-patches wheel)"
                )
        for mount in mounts:
            if place.is_relative_to(mount):
                raise PatchesError(
                    f"{mount} is mounted on its own, and no file can be renamed into "
                    "it; unmount it, or mount a patched vLLM there (vllm-patches "
                    "wheel)"
                )


def _mounts(root: Path) -> list[Path]:
    """What is mounted below the root."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    points = (line.split()[4] for line in lines)
    unescaped = (
        re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point)
        for point in points
    )
    return [
        Path(p) for p in unescaped if Path(p) != root and Path(p).is_relative_to(root)
    ]


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
