"""How a script enters its environment."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.engines import environment
from vllm_patches import releases

ROOT = environment.ROOT


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that `enter` runs, none of it done."""
    command: list[str] = []
    monkeypatch.setattr(environment, "ensure", lambda release: Path(release.version))
    monkeypatch.setattr("os.chdir", lambda folder: None)
    monkeypatch.setattr("os.execv", lambda python, words: command.extend(words))
    return command


@pytest.mark.parametrize(
    "arguments, release, passed_on",
    [
        ([], releases.default().version, []),
        (["-x", "tests/unit"], releases.default().version, ["-x", "tests/unit"]),
        (["--release", "0.31.0", "tests"], "0.31.0", ["tests"]),
        (["-k", "not a", "--release=0.25.1", "-q"], "0.25.1", ["-k", "not a", "-q"]),
        (["--help"], releases.default().version, ["--help"]),
    ],
)
def test_release_is_read_once(
    entered: list[str], arguments: list[str], release: str, passed_on: list[str]
) -> None:
    """pytest and the other modules never see it."""
    environment.enter("pytest", arguments)
    assert entered == [release, "-m", "pytest", *passed_on]


def test_unknown_release_is_told(entered: list[str]) -> None:
    with pytest.raises(SystemExit, match="no series for vLLM 9.9; there is 0.24.0, "):
        environment.enter("pytest", ["--release", "9.9"])
    assert not entered


@pytest.mark.parametrize("module", ["roundtrip_cli", "bench"])
def test_help_lists_release(module: str) -> None:
    command = [sys.executable, "-m", f"scripts.engines.{module}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "--release" in done.stdout


def test_entering_takes_the_standard_library_alone() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import scripts.engines."
    command = [sys.executable, "-I", "-S", "-c", code + "environment"]
    subprocess.run(command, check=True)
