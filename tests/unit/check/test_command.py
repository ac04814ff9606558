"""The command line, and processes that fail, or whose starter is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.check.test_verdict import checked
from tests.unit.tool.test_bad_input import run
from vllm_patches.check import command, processes
from vllm_patches.errors import PatchesError, UsageError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is checked; nothing is run."""
    asked: list[Any] = []

    def model(arguments: list[str], stock: bool) -> Any:
        asked.append((arguments, stock))
        return checked(wrong=3 * stock)

    monkeypatch.setattr(command, "model", model)
    return asked


@pytest.mark.parametrize(
    "flags", [["-tp", "2"], ["--tensor-parallel-size=2", "--max-model-len", "4096"]]
)
def test_vllm_s_flags_are_passed_on(asked: list[Any], flags: list[str]) -> None:
    result = run("check", "some/model", *flags, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["served"] == [768, 1024]
    assert asked == [(["some/model", *flags], False)]


def test_wrong_pages_are_exit_status_1(asked: list[Any]) -> None:
    result = run("check", "--stock", "some/model", "--enforce-eager")
    assert result.exit_code == 1
    assert result.stdout.startswith("0\tMambaSpec\t3\t256\t1\t12\t3\n")
    assert "error: 3 of 12 pages hold other bytes" in result.stderr
    assert asked == [(["some/model", "--enforce-eager"], True)]


@pytest.mark.parametrize(
    "words", [[], ["--pages", "some/model"], ["--pages", "--stock"]]
)
def test_wrong_usage_is_exit_status_2(asked: list[Any], words: list[str]) -> None:
    result = run("check", *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert not asked


def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Any:
    """A run of a module of that code."""
    (tmp_path / "some_module.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    return command._Run(tmp_path, "child", "some_module")


@pytest.mark.parametrize(
    "code, details",
    [
        ("print('what is wrong', flush=True)", ["what is wrong"]),
        (
            "for e in 'a', 'a', 'b': print(f'(Worker) 1: ValueError: {e}', flush=True)",
            ["ValueError: a", "ValueError: b"],
        ),
    ],
)
def test_failing_process_is_told_with_the_errors_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, details: list[str]
) -> None:
    code += "\nraise SystemExit(3)"
    with pytest.raises(PatchesError, match="child ended with status 3") as failed:
        child(tmp_path, monkeypatch, code).until_done({}, lambda: None)
    assert failed.value.details == details
    assert str(tmp_path / "child.log") in str(failed.value)


def test_silent_process_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_SILENCE", 0.5)
    code = "import time; print('started', flush=True); time.sleep(600)"
    with pytest.raises(PatchesError, match="said nothing"):
        child(tmp_path, monkeypatch, code).until_done({}, lambda: None)


def test_refused_flag_is_told_in_the_words_of_the_parser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import argparse; argparse.ArgumentParser().parse_args(['--x'])"
    with pytest.raises(UsageError, match="^unrecognized arguments: --x$"):
        child(tmp_path, monkeypatch, code).until_done({}, lambda: None)


FAMILY = """
import os, subprocess, sys, time
from pathlib import Path
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
for pid in (os.getpid(), other.pid):
    Path(f"/dev/shm/lmcache_kv_{pid}_0").write_bytes(b"")
print(os.getpid(), other.pid, flush=True)
time.sleep(600)
"""
STARTER = """
import os, sys, time
from vllm_patches.check import processes
with processes.guarded("some_module", [], int(sys.argv[1]), dict(os.environ)):
    time.sleep(600)
"""


def test_a_killed_starter_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither a process nor shared memory, though nobody could clean up."""
    (tmp_path / "some_module.py").write_text(FAMILY)
    path = f"{tmp_path}{os.pathsep}{os.getcwd()}"
    reader, writer = os.pipe()
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(writer)],
        env=os.environ | {"PYTHONPATH": path},
        pass_fds=[writer],
    )
    os.close(writer)
    with os.fdopen(reader) as said:
        pids = {int(word) for word in said.readline().split()}
        assert len(pids) == 2 and pids <= processes.shared_memory().keys()
        starter.send_signal(signal.SIGKILL)
        starter.wait()
        deadline = time.monotonic() + 30
        while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))
    assert not pids & processes.shared_memory().keys()
