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


def distribution(version: str) -> str:
    """The name of the distribution that has this release's wheel."""
    release = releases.find(version)
    return release.distribution if release else "vllm"


def fetch_wheel(version: str) -> Path:
    """The release's wheel, downloaded once. Read it, never change it."""
    folder = CACHE / "wheels"
    name = distribution(version)
    pattern = f"{name.replace('-', '_')}-{version}-*x86_64.whl"
    found = sorted(folder.glob(pattern))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary", ":all:", "--python-version", "3.11"]
            command += ["--platform", "manylinux_2_28_x86_64"]
            command += [f"{name}=={version}", "-d", fresh]
            subprocess.run(command, check=True)
            for path in Path(fresh).glob(pattern):
                os.replace(path, folder / path.name)
        found = sorted(folder.glob(pattern))
    return found[0]


def unpack_python(version: str) -> Path:
    """A pristine tree of the release: its .py files and its dist-info, whose RECORD
    lists just these. Shared and cached: copy it (`copy_tree`) before changing it."""
    tree = CACHE / "trees" / version
    if tree.exists():
        return tree
    tree.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=tree.parent, prefix=f".{version}-"))
    with zipfile.ZipFile(fetch_wheel(version)) as archive:
        for name in archive.namelist():
            if name.endswith(".py") or ".dist-info/" in name:
                archive.extract(name, fresh)
    trim_record(fresh)
    try:
        fresh.rename(tree)
    except OSError:  # another process was first
        shutil.rmtree(fresh)
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
