"""Which files a folder ships: a list with their hashes, as `sha256sum` writes it.

A build may leave files of an earlier one in a folder; what the list does not name is
not read. Standard library only.
"""

import hashlib
from pathlib import Path

from vllm_patches.errors import PatchesError

NAME = "SHA256SUMS"


def read(folder: Path) -> dict[str, bytes]:
    """The listed files' bytes by their path in the folder, in the list's order.

    Raises PatchesError if the list or a file is missing or not as listed.
    """
    files = {}
    for line in _lines(folder):
        digest, _, name = line.partition("  ")
        path = folder / name
        data = path.read_bytes() if path.is_file() else None
        if data is None or hashlib.sha256(data).hexdigest() != digest:
            problem = "missing" if data is None else "not as listed"
            raise PatchesError(
                f"{path} is {problem} in {folder / NAME}; reinstall "
                "vllm-logical-blocks (in a checkout, `scripts/refresh` lists it anew)",
                code="damaged-tool",
            )
        files[name] = data
    return files


def write(folder: Path) -> bool:
    """List all files that are there. Says whether the list changed."""
    files = (path for path in folder.rglob("*") if path.is_file())
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in files
        if path.suffix != ".pyc" and path.name != NAME
    )
    text = "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in names
    )
    listing = folder / NAME
    if listing.is_file() and listing.read_text() == text:
        return False
    listing.write_text(text)
    return True


def _lines(folder: Path) -> list[str]:
    try:
        return (folder / NAME).read_text().splitlines()
    except FileNotFoundError:
        return []
