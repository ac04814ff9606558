"""A patched wheel from a pristine one, streamed."""

import contextlib
import copy
import errno
import hashlib
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import IO, BinaryIO, cast

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from vllm_patches import __version__
from vllm_patches.errors import PatchesError
from vllm_patches.installation import (
    LOCAL_TAG,
    OWNED,
    WHEEL_PATCHES,
    WheelPatches,
    has_local_tag,
)
from vllm_patches.patch_set import PatchSet
from vllm_patches.record import CHUNK, Record, stream_sha256

REVISION = 3
"""Orders the wheels of one vLLM release: raise it when a series or the overlay changes
after wheels were given out. What tells their bytes apart is the digest behind it."""
NOTICE = """\
This wheel of {name} {version} was changed by vllm-logical-blocks {tool}.

vLLM is the work of the vLLM contributors, under the Apache License 2.0; so are these
changes. They are those of release {release} in the series of vllm-logical-blocks, with
digest {digest}.

Modified files:
{modified}

New files:
{new}
"""
"""In the dist-info of a patched wheel, as section 4(b) of the license asks for."""
MODE = 0o100644 << 16
"""A new file's attributes in the archive."""
BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeError)


@dataclass(frozen=True)
class Plan:
    """What a patched wheel will be, every file that changes already made."""

    source: Path
    wheel: Path
    version: str
    release: str
    old: str
    """How the dist-info's name starts in the source: name-version."""
    new: str
    changed: dict[str, bytes]
    """By its path in the patched wheel, RECORD included."""
    record: Record
    """The source's own."""

    def rename(self, path: str) -> str:
        """The path in the patched wheel of a file of the source."""
        return _renamed(path, self.old, self.new)


def plan(source: Path, folder: Path) -> Plan:
    """Read a wheel and make everything that changes. Raises PatchesError on a file
    that is no complete, pristine wheel of a supported vLLM release."""
    try:
        parse_wheel_filename(source.name)
    except InvalidWheelFilename:
        raise PatchesError(
            f"{source} is not named as a wheel; give name-version-tags.whl"
        ) from None
    with _opened(source) as archive:
        names = archive.namelist()
        infos = [
            name for name in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)
        ]
        data = archive.read(infos[0]) if len(infos) == 1 else b""
        record = Record.parse(data, source)
        if OWNED not in record.entries:
            raise PatchesError(f"{source} is no vLLM wheel: no RECORD lists {OWNED}")
        old = infos[0].removesuffix(".dist-info/RECORD")
        unsigned = {f"{old}.dist-info/RECORD.{kind}" for kind in ("jws", "p7s")}
        files = {name for name in names if not name.endswith("/")}
        if extra := sorted(files - record.entries.keys() - unsigned):
            raise PatchesError(
                f"{source} has {extra[0]}, which its RECORD does not list; download it "
                "again",
                code="changed",
            )
        metadata = archive.read(f"{old}.dist-info/METADATA")
        version = BytesHeaderParser().parsebytes(metadata)["Version"]
        if has_local_tag(version):
            raise PatchesError(f"{source} is patched already; give the pristine wheel")
        patch_set = PatchSet.require(version, archive.read)
        present = sorted(patch_set.overlay.keys() & set(names))
        if present:
            raise PatchesError(
                f"{source} has {present[0]} already; give a pristine one"
            )
        for path in patch_set.touched:
            if path in names:
                _check(source, archive, path, record)
        made = patch_set.apply(archive.read)

    said = WheelPatches(
        tool=__version__,
        release=patch_set.version,
        patches=[patch.name for patch in patch_set.patches],
        contract=patch_set.contract,
        digest=patch_set.digest,
    )
    about = (json.dumps(asdict(said), indent=1) + "\n").encode()
    tag = f"{LOCAL_TAG}.{REVISION}.d{hashlib.sha256(about).hexdigest()[:8]}"
    patched = f"{version}.{tag}" if Version(version).local else f"{version}+{tag}"
    name = old.split("-")[0]
    new = f"{name}-{patched}"
    changed = made | patch_set.overlay
    changed[f"{new}.dist-info/{WHEEL_PATCHES}"] = about
    changed[f"{new}.dist-info/NOTICE.vllm-logical-blocks"] = NOTICE.format(
        name=name,
        version=version,
        modified="\n".join(made),
        new="\n".join(patch_set.overlay),
        **asdict(said),
    ).encode()
    changed[f"{new}.dist-info/METADATA"] = re.sub(
        rb"(?m)^Version: .*$", f"Version: {patched}".encode(), metadata, count=1
    )
    tags = source.name.split("-", 2)[2]
    listed = record.renamed(lambda path: _renamed(path, old, new)).with_files(changed)
    changed[f"{new}.dist-info/RECORD"] = listed.encode()
    wheel = folder / f"{new}-{tags}"
    return Plan(source, wheel, patched, patch_set.version, old, new, changed, record)


def check(plan: Plan) -> None:
    """What `build` checks: raises PatchesError on a source whose files are not as its
    RECORD says, or a place that cannot be written to."""
    folder = plan.wheel.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise PatchesError(f"{folder} is no folder that you can write to; give another")
    with _opened(plan.source) as archive:
        for entry in archive.infolist():
            if plan.rename(entry.filename) not in plan.changed:
                _check(plan.source, archive, entry.filename, plan.record)


def build(plan: Plan) -> str:
    """Write the patched wheel; same source, same bytes. Unchanged files are copied as
    they are compressed. Gives the wheel's SHA-256; raises PatchesError, nothing
    written, on a source whose files are not as its RECORD says."""
    plan.wheel.parent.mkdir(parents=True, exist_ok=True)
    with _written_at_once(plan.wheel) as part:
        with (
            _opened(plan.source) as archive,
            plan.source.open("rb") as raw,
            zipfile.ZipFile(part, "w") as patched,
        ):
            entries = archive.infolist()
            metadata = [e for e in entries if ".dist-info/" in e.filename]
            for entry in entries:
                if entry not in metadata:
                    _write(plan, archive, raw, patched, entry)
            old_names = {plan.rename(name) for name in archive.namelist()}
            for path in sorted(plan.changed.keys() - old_names):
                date = archive.getinfo(OWNED).date_time
                _add(patched, path, date, MODE, plan.changed[path])
            for entry in metadata:
                _write(plan, archive, raw, patched, entry)
        part.seek(0)
        sha256 = stream_sha256(part).hex()
    with _written_at_once(Path(f"{plan.wheel}.sha256")) as sums:
        sums.write(f"{sha256}  {plan.wheel.name}\n".encode())
    return sha256


@contextlib.contextmanager
def _written_at_once(path: Path) -> Iterator[BinaryIO]:
    """A file that is there when it is whole, and whose parts go with the process, even
    if that is killed: it has no name until then, where the file system has such."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        handle = os.open(path.parent, os.O_RDWR | os.O_TMPFILE, 0o666)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EISDIR, errno.EINVAL):
            raise
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield cast(BinaryIO, file)
            file.flush()
            os.fsync(file.fileno())
            if not part.exists():
                # With a folder's handle it follows the link.
                os.link(f"/proc/self/fd/{handle}", part, src_dir_fd=handle)
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[zipfile.ZipFile]:
    """The wheel's archive. Raises PatchesError if it is broken."""
    try:
        with zipfile.ZipFile(source) as archive:
            yield archive
    except FileNotFoundError:
        raise PatchesError(f"no file {source}; give a vLLM wheel") from None
    except BROKEN as error:
        raise PatchesError(
            f"{source} is truncated or no wheel ({error}); download it again"
        ) from None


def _renamed(path: str, old: str, new: str) -> str:
    for folder in (".dist-info/", ".data/"):
        if path.startswith(old + folder):
            return new + path[len(old) :]
    return path


def _check(source: Path, archive: zipfile.ZipFile, name: str, record: Record) -> None:
    """Raises PatchesError if a file is not as RECORD says."""
    if not (entry := record.entries.get(name)):
        return
    with archive.open(name) as file:
        if not entry.validate_stream(cast(BinaryIO, file)):
            raise PatchesError(
                f"{name} in {source} is not as its RECORD says; download it again"
            )


def _write(
    plan: Plan,
    archive: zipfile.ZipFile,
    raw: IO[bytes],
    patched: zipfile.ZipFile,
    entry: zipfile.ZipInfo,
) -> None:
    """Write one entry of the source: its new bytes, or its old ones as they lie."""
    path = plan.rename(entry.filename)
    if path in plan.changed:
        data = plan.changed[path]
        _add(patched, path, entry.date_time, entry.external_attr, data)
        return
    _check(plan.source, archive, entry.filename, plan.record)
    assert patched.fp is not None
    copied = copy.copy(entry)
    copied.filename = path
    copied.extra = b""
    copied.flag_bits &= ~0x08  # sizes are in the header, not behind the data
    copied.header_offset = patched.start_dir
    patched.fp.seek(patched.start_dir)
    patched.fp.write(copied.FileHeader())
    raw.seek(entry.header_offset + 26)
    name_size, extra_size = struct.unpack("<HH", raw.read(4))
    raw.seek(name_size + extra_size, os.SEEK_CUR)
    left = entry.compress_size
    while left:
        chunk = raw.read(min(left, CHUNK))
        patched.fp.write(chunk)
        left -= len(chunk)
    patched.start_dir = patched.fp.tell()
    patched.filelist.append(copied)
    patched.NameToInfo[path] = copied


def _add(
    patched: zipfile.ZipFile,
    path: str,
    date: tuple[int, int, int, int, int, int],
    attributes: int,
    data: bytes,
) -> None:
    """Write new bytes, stored: compressors differ from one Python to the next."""
    entry = zipfile.ZipInfo(path, date)
    entry.create_system = 3  # Unix, wherever this runs
    entry.external_attr = attributes
    patched.writestr(entry, data)
