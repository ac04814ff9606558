"""Apply and revert, ended at every file operation."""

import errno
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.tool.conftest import (
    At,
    Snapshot,
    child,
    ended,
    kill,
    operations,
    snapshot,
)
from vllm_patches import actions, transaction
from vllm_patches.errors import PatchesError
from vllm_patches.installation import Installation, Mismatch

pytestmark = pytest.mark.usefixtures("small_series")
BLOCK_TABLE = "vllm/v1/worker/block_table.py"


def apply(root: Path) -> None:
    actions.apply(root, dry_run=False)


def revert(root: Path) -> None:
    actions.revert(root, dry_run=False)


def state(root: Path) -> str:
    return actions.status(root).state


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def work_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: hundreds of runs flush every file."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(dir=memory if memory.is_dir() else tmp_path)
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.fixture(params=["installed", "bare"])
def old(request: pytest.FixtureRequest, cut: Path, work_folder: Path) -> Path:
    """A tree as shipped, with something compiled; with and without a dist-info."""
    tree = shutil.copytree(cut, work_folder / "old")
    if request.param == "bare":
        (info,) = tree.glob("*.dist-info")
        shutil.rmtree(info)
    return tree


@pytest.fixture
def new(old: Path, work_folder: Path) -> Path:
    """The same tree, patched."""
    tree = shutil.copytree(old, work_folder / "new")
    apply(tree)
    return tree


def each_step(
    source: Path,
    work: Path,
    run: Callable[[Path], None],
    action: Callable[[], None],
    every: int = 1,
) -> Iterator[int]:
    """Run on a fresh copy, `action` striking ahead of one file operation after the
    other, or of each `every`-th. Gives each exit status."""
    shutil.copytree(source, work)
    steps = operations(lambda: run(work))
    assert steps
    for step in range(0, steps, every):
        shutil.rmtree(work)
        shutil.copytree(source, work)
        yield ended(child(lambda: run(work), At(step, action)))  # noqa: B023


def told(root: Path, before: Snapshot, after: Snapshot) -> str:
    """What status says, checked where it says that the tree is whole."""
    said = state(root)
    if said == "unpatched":
        assert snapshot(root) == before
    elif said == "patched":
        assert snapshot(root) == after
    else:
        assert said == "interrupted"
    return said


@pytest.mark.parametrize("run", [apply, revert])
@pytest.mark.parametrize("then", [apply, revert])
def test_killed_at_every_step(
    run: Callable, then: Callable, old: Path, new: Path, work_folder: Path
) -> None:
    before, after = snapshot(old), snapshot(new)
    work, seen = work_folder / "work", set()
    for status in each_step(old if run is apply else new, work, run, kill):
        assert status == -signal.SIGKILL
        said = told(work, before, after)
        seen.add(said)
        if (said, then) in (("patched", apply), ("unpatched", revert)):
            with pytest.raises(PatchesError):  # nothing left to do, and it says so
                then(work)
        else:
            then(work)
        assert snapshot(work) == (after if then is apply else before)
    assert "interrupted" in seen


@pytest.mark.parametrize("first", [apply, revert])
def test_killed_again_while_undoing(
    first: Callable, old: Path, new: Path, work_folder: Path
) -> None:
    before = snapshot(old)
    half = work_folder / "half"
    steps = each_step(old if first is apply else new, half, first, kill)
    halves = 0
    for step, _ in enumerate(steps):
        if state(half) != "interrupted" or step % (6 if first is apply else 2):
            continue
        halves += 1
        for _ in each_step(half, work_folder / "work", revert, kill):
            if state(work_folder / "work") == "interrupted":
                revert(work_folder / "work")
            assert snapshot(work_folder / "work") == before
        shutil.rmtree(work_folder / "work")
    assert halves > 2


@pytest.mark.parametrize("run", [apply, revert])
def test_error_at_every_step(
    run: Callable, old: Path, new: Path, work_folder: Path
) -> None:
    before, after = snapshot(old), snapshot(new)
    work = work_folder / "work"
    for status in each_step(old if run is apply else new, work, run, no_space):
        said = told(work, before, after)
        if status == 0:  # an operation that need not succeed
            assert said == ("patched" if run is apply else "unpatched")
        if said == "interrupted":
            revert(work)
            assert snapshot(work) == before


@pytest.mark.parametrize("size", [0, 1, 500, 5000, 12000])
def test_disk_full_while_writing(old: Path, size: int) -> None:
    """A file that can only be written in part."""
    before = snapshot(old)

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        apply(old)

    assert ended(child(run, lambda: None)) == 2
    assert snapshot(old) == before
    assert state(old) == "unpatched"


def test_second_process_is_refused(old: Path, new: Path, work_folder: Path) -> None:
    """Whatever step the first one is at."""
    after = snapshot(new)
    for step in range(0, 40, 3):
        work = work_folder / f"work{step}"
        shutil.copytree(old, work)
        stop = At(step, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        pid = child(lambda: apply(work), stop)  # noqa: B023
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        for run in (apply, revert, actions.verify, actions.diff):
            with pytest.raises(PatchesError, match="another vllm-patches is at work"):
                run(work)
        assert state(work) == "busy"
        os.kill(pid, signal.SIGCONT)
        assert ended(pid) == 0
        assert snapshot(work) == after


def test_interrupted_by_ctrl_c(old: Path) -> None:
    before = snapshot(old)

    def interrupt() -> None:
        raise KeyboardInterrupt

    status = ended(child(lambda: apply(old), At(25, interrupt)))
    assert status == 1
    assert snapshot(old) == before


def test_compiled_files_of_changed_ones_go(old: Path) -> None:
    cache = (old / BLOCK_TABLE).parent / "__pycache__"
    cache.mkdir()
    stale = cache / "block_table.cpython-311.pyc"
    other = cache / "utils.cpython-311.pyc"
    for path in (stale, other):
        path.write_bytes(b"compiled")
    apply(old)
    assert not stale.exists()
    assert other.exists()
    stale.write_bytes(b"compiled from the patched one")
    overlay = cache / "logical.cpython-311.opt-1.pyc"
    overlay.write_bytes(b"compiled from the overlay")
    revert(old)
    assert not stale.exists()
    assert not overlay.exists()
    assert other.exists()


def test_compiled_overlay_leaves_no_folder(old: Path) -> None:
    before = snapshot(old)
    apply(old)
    cache = old / "vllm/pages/deep/__pycache__"
    cache.mkdir()
    (cache / "__init__.cpython-311.pyc").write_bytes(b"compiled")
    revert(old)
    assert snapshot(old) == before


def test_revert_keeps_times(old: Path) -> None:
    time = (old / BLOCK_TABLE).stat().st_mtime_ns
    apply(old)
    revert(old)
    assert (old / BLOCK_TABLE).stat().st_mtime_ns == time


def test_edit_after_apply_is_not_lost(new: Path) -> None:
    with (new / BLOCK_TABLE).open("a") as file:
        file.write("# mine\n")
    before = snapshot(new)
    with pytest.raises(PatchesError, match="block_table.py was edited after apply"):
        revert(new)
    assert snapshot(new) == before
    assert actions.verify(new).mismatches == [Mismatch(BLOCK_TABLE, "changed")]


def test_lost_original_is_told(new: Path) -> None:
    (kept,) = new.rglob("block_table.py.orig")
    kept.write_text("")
    before = snapshot(new)
    with pytest.raises(PatchesError, match="lost or damaged; reinstall"):
        revert(new)
    assert snapshot(new) == before


@pytest.mark.parametrize("content", ["", "[]", '{"phase": "patched"}'])
def test_damaged_journal_is_told(new: Path, content: str) -> None:
    (journal,) = new.rglob("journal.json")
    journal.write_text(content)
    way = "lost or damaged; reinstall"
    if not list(new.glob("*.dist-info")):
        way = "damaged; put the files below .*/old back or unpack the tree anew"
    for run in (apply, revert, actions.verify, actions.status):
        with pytest.raises(PatchesError, match=way):
            run(new)


def test_originals_survive_a_lost_journal(cut: Path, small: Path) -> None:
    apply(small)
    (journal,) = small.rglob("journal.json")
    journal.unlink()
    with pytest.raises(PatchesError, match="lost or damaged; reinstall"):
        revert(small)
    assert list(small.rglob("block_table.py.orig"))
    assert transaction.state_folder(Installation.find(small)).exists()
