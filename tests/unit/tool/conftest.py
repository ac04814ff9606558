"""A small cut of a real release, a small series for it, and processes that die."""

import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.series import wheels
from vllm_patches import patch_set, releases, sums

RELEASE = "0.32.0"
WORKER = "vllm/v1/worker"
GIT = ["git", "-c", "user.name=Someone", "-c", "user.email=someone@example.org"]

Snapshot = dict[str, tuple[int, bytes | None]]


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder."""
    command = [*GIT, *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def edit(path: Path, old: str, new: str) -> None:
    """Replace some text that must be there once."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def snapshot(root: Path) -> Snapshot:
    """Every file and folder below root: its mode and bytes."""
    return {
        path.relative_to(root).as_posix(): (
            path.stat().st_mode,
            path.read_bytes() if path.is_file() else None,
        )
        for path in root.rglob("*")
    }


@pytest.fixture(scope="session")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM 0.32.0's worker with its dist-info, as shipped. Not to be changed."""
    source = wheels.unpack_python(RELEASE)
    root = tmp_path_factory.mktemp("cut")
    (info,) = source.glob("*.dist-info")
    files = [source / "vllm/__init__.py", source / "vllm/_version.py"]
    files += (source / WORKER).glob("*.py")
    files += (path for path in info.rglob("*") if path.is_file())
    for path in files:
        copy = root / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    wheels.trim_record(root)
    return root


@pytest.fixture
def small(cut: Path, tmp_path: Path) -> Path:
    """A copy of the cut to patch."""
    return shutil.copytree(cut, tmp_path / "site-packages")


@pytest.fixture(scope="session")
def patched(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the cut with the small series on top, tagged v0.32.0 below it."""
    checkout = tmp_path_factory.mktemp("checkout")
    shutil.copytree(cut, checkout, dirs_exist_ok=True)
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "As released")
    git(checkout, "tag", f"v{RELEASE}")
    table = checkout / WORKER / "block_table.py"
    lines = table.read_text().split("\n")
    table.write_text("\n".join(["import first", *lines[:200], "# end", *lines[202:]]))
    git(checkout, "commit", "-qam", "Two hunks in one file")
    edit(table, "import first", "import first_again\n\n-- x")
    edit(checkout / WORKER / "worker_base.py", "SPDX-FileCopyr", "SPDX-Patched")
    git(checkout, "commit", "-qam", "A second patch on it, and another file")
    return checkout


@pytest.fixture
def small_series(
    patched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The small series, in place of the project's, and an overlay with a new folder."""
    folder = tmp_path / "series"
    arguments = ["format-patch", "-q", f"v{RELEASE}", "-o", str(folder / f"v{RELEASE}")]
    git(patched, *arguments)
    overlay = tmp_path / "overlay"
    (overlay / WORKER).mkdir(parents=True)
    (overlay / WORKER / "logical.py").write_text("CONTRACT_VERSION = 7\n")
    (overlay / "vllm/pages/deep").mkdir(parents=True)
    (overlay / "vllm/pages/deep/__init__.py").write_text("")
    for listed in (folder / f"v{RELEASE}", overlay):
        sums.write(listed)
    release = releases.Release(RELEASE, "2.13.0", ("0.5.6",), "pooled", engine=True)
    monkeypatch.setattr(releases, "SERIES", folder)
    monkeypatch.setattr(releases, "RELEASES", (release,))
    monkeypatch.setattr(patch_set, "OVERLAY", overlay)
    return folder / f"v{RELEASE}"


WRITES = {
    "os.chown",
    *("os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.utime"),
    *("os.truncate", "os.link", "os.symlink"),
}


def is_write(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an audit event is a file operation that changes something."""
    if event == "open":
        return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in WRITES


def child(function: Callable[[], object], before: Callable[[], object]) -> int:
    """Run a function in another process, calling `before` ahead of each of its file
    operations. Gives the process id; wait for it with `ended`."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        sys.addaudithook(
            lambda event, arguments: before() if is_write(event, arguments) else None
        )
        function()
        status = 0
    except OSError:
        status = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def operations(function: Callable[[], object]) -> int:
    """How many file operations a function does, run in another process."""
    reader, writer = os.pipe()
    assert ended(child(function, lambda: os.write(writer, b"x"))) == 0
    os.close(writer)
    with os.fdopen(reader) as file:
        return len(file.read())


def ended(pid: int) -> int:
    """A process's exit status, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class At:
    """Does something ahead of the n-th file operation, counted from 0."""

    def __init__(self, n: int, action: Callable[[], object]) -> None:
        self.left = n
        self.action = action

    def __call__(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.action()


def kill() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)
