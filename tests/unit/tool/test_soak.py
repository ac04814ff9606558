"""kill -9 at 300 random moments, on a release's files by the project's series."""

import contextlib
import os
import random
import select
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.series import wheels
from tests.unit.tool.conftest import RELEASE, At, Snapshot, child, ended, snapshot
from tests.unit.tool.test_transaction import apply, revert, state
from vllm_patches.patch_set import PatchSet

KILLS = 300
SEED = 14


def killed(run: Callable[[Path], None], tree: Path, after: float) -> tuple[bool, float]:
    """Run in another process and kill it some seconds after its first write, if it
    lives till then. Gives whether it was killed, and how long it wrote."""
    reader, writer = os.pipe()
    pid = child(lambda: run(tree), At(0, lambda: os.write(writer, b"x")))
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    start = time.perf_counter()
    with contextlib.suppress(ProcessLookupError):
        if not select.select([reader], [], [], after)[0]:  # the pipe ends with it
            os.kill(pid, signal.SIGKILL)
    os.close(reader)
    return ended(pid) == -signal.SIGKILL, time.perf_counter() - start


def parts(tree: Path) -> Path:
    """What of the release the series touches, and what is beside it."""
    source = wheels.unpack_python(RELEASE)
    patch_set = PatchSet.find(RELEASE)
    assert patch_set
    (info,) = source.glob("*.dist-info")
    folders = {info, *((source / path).parent for path in patch_set.touched)}
    for folder in sorted(folders):
        shutil.copytree(folder, tree / folder.relative_to(source), dirs_exist_ok=True)
    for name in ("vllm/__init__.py", "vllm/_version.py"):
        shutil.copy2(source / name, tree / name)
    wheels.trim_record(tree)
    return tree


def whole(tree: Path) -> Snapshot:
    """The tree but for what Python compiled."""
    return {
        name: data for name, data in snapshot(tree).items() if not name.endswith(".pyc")
    }


@pytest.mark.full
def test_killed_at_300_random_moments(tmp_path: Path) -> None:
    """Every time status tells the truth, and the next run ends where it should."""
    tree = parts(tmp_path / "site-packages")
    before = whole(tree)
    longest = killed(apply, tree, 60)[1]
    after = whole(tree)
    chance, seen, kills = random.Random(SEED), Counter[str](), 0
    while kills < KILLS:
        run = revert if state(tree) == "patched" else apply
        was_killed, _ = killed(run, tree, chance.uniform(0, longest))
        kills += was_killed
        said = state(tree)
        seen[said] += 1
        if said != "interrupted":
            assert whole(tree) == (after if said == "patched" else before)
            continue
        then = chance.choice([apply, revert])
        then(tree)
        assert whole(tree) == (after if then is apply else before)
    print(f"{kills} kills: {dict(seen)}")
    assert seen["interrupted"] > KILLS / 10
