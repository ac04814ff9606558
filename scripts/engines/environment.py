"""Set up and enter the environment that a release's engines run in.

Standard library only: it runs before anything is installed.
"""

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import tomllib

from vllm_patches import releases
from vllm_patches.releases import Release

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"

RELEASE_HELP = (
    f"--release VERSION chooses the vLLM release, {releases.default().version} if left "
    "out."
)
"""For the help of commands that `enter` starts."""

# vLLM's CPU wheels bring CUDA builds of these, which the CPU build of torch does not
# load; transformers fails on the attempt.
_BROKEN = ("torchvision", "torchaudio", "torchcodec")

_LIST_REQUIREMENTS = """
import importlib.metadata, sys
required = importlib.metadata.requires(sys.argv[1])
print("\\n".join(r for r in required if not r.startswith("torch")), end="")
"""


def folder(release: Release) -> Path:
    return ROOT / ".venv" / release.version


def ensure(release: Release) -> Path:
    """Install vLLM, LMCache and this project once, patch vLLM; returns its python.

    Safe to call again and from several processes: what is done is not done twice.
    """
    env = folder(release)
    env.parent.mkdir(exist_ok=True)
    with (env.parent / f"{release.version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = env / "bin" / "python"
        requirements = _requirements(release)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        wanted = json.dumps([sys.version, requirements])
        marker = env / "installed.json"
        if not marker.exists() or marker.read_text() != wanted:
            name = f".venv/{release.version}"
            _say(f"Setting up {name}: vLLM, LMCache (some minutes, 4 GB)")
            shutil.rmtree(env, ignore_errors=True)
            venv.create(env, with_pip=True)
            _run([*pip, "install", "-q", "-U", "pip"])
            if release.cpu_torch:
                _run([*pip, "install", "-q", *requirements])
            else:
                _install_without_torch(python, pip, release)
            _run([*pip, "uninstall", "-q", "-y", *_BROKEN])
            marker.write_text(wanted)
        project = (ROOT / "pyproject.toml").read_text()
        marker = env / "project.toml"
        if not marker.exists() or marker.read_text() != project:
            _run([*pip, "install", "-q", "-e", f"{ROOT}[test,lint]"])
            marker.write_text(project)
        _run([str(env / "bin" / "vllm-patches"), "apply", "--update"])
    return python


def _install_without_torch(python: Path, pip: list[str], release: Release) -> None:
    """Install vLLM over the CUDA build of torch, which runs on the CPU as well."""
    vllm, lmcache = _requirements(release)
    _run([*pip, "install", "-q", "--no-deps", vllm])
    listing = _run([str(python), "-c", _LIST_REQUIREMENTS, release.distribution])
    torch = f"torch=={release.torch}"
    _run([*pip, "install", "-q", torch, lmcache, *listing.split("\n")])


def _requirements(release: Release) -> tuple[str, str]:
    return (
        f"{release.distribution}=={release.version}",
        f"lmcache=={release.lmcache[-1]}",
    )


def enter(module: str, arguments: list[str]) -> None:
    """Replace this process by ``python -m module`` in a release's environment.

    ``--release`` chooses it and is not passed on: the release is what the environment
    has.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--release", default=releases.default().version)
    chosen, rest = parser.parse_known_args(arguments)
    release = releases.find(chosen.release)
    if not release:
        known = ", ".join(each.version for each in releases.RELEASES)
        sys.exit(f"error: no series for vLLM {chosen.release}; there is {known}")
    python = ensure(release)
    os.chdir(ROOT)
    os.execv(python, [str(python), "-m", module, *rest])


def enter_tools(module: str, arguments: list[str]) -> None:
    """Replace this process by ``python -m module`` where no vLLM is: in an environment
    of this project's own requirements, made in seconds."""
    env = ROOT / ".venv" / "tools"
    env.parent.mkdir(exist_ok=True)
    python = env / "bin" / "python"
    project = (ROOT / "pyproject.toml").read_text()
    with (env.parent / "tools.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        marker = env / "project.toml"
        if not marker.exists() or marker.read_text() != project:
            venv.create(env, with_pip=True)
            pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
            _run(
                [
                    *pip,
                    "install",
                    "-q",
                    *tomllib.loads(project)["project"]["dependencies"],
                ]
            )
            marker.write_text(project)
    os.chdir(ROOT)
    os.execv(python, [str(python), "-m", module, *arguments])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
