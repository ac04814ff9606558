"""Every release's tree: patched, compiled, tested in its own process, and restored.

The overlay's tests take its every branch, on one release or another.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import coverage
import pytest

from scripts.series import wheels
from vllm_patches import actions, releases
from vllm_patches.patch_set import OVERLAY

ROOT = Path(__file__).parents[2]
RELEASES = [release.version for release in releases.RELEASES]
TESTS = (ROOT / "tests/series/worker", ROOT / "tests/unit/overlay")
BETWEEN = ("0.25.0", "0.27.0", "0.27.1", "0.29.0", "0.30.0")
"""Releases between two that take all tests: without --full they take neither random
pools nor the list of known geometries, which are half of the time."""
LEFT_OUT = ("test_properties.py", "test_geometries.py")
OVERLAY_FILES = sorted(OVERLAY.rglob("*.py"))


@dataclass(frozen=True)
class Run:
    """What was seen in one release's tree."""

    before: dict[str, str]
    """Hashes of the pristine files."""
    patched: dict[str, str]
    after: dict[str, str]
    """Hashes once the series is taken out again."""
    compiled: subprocess.CompletedProcess[str]
    tested: subprocess.CompletedProcess[str]
    coverage: Path
    """Which branches of the overlay the tests took."""
    fingerprints: dict[str, str]
    """Of one pool, by its kernel block size."""


def run(release: str, folder: Path, full: bool) -> Run:
    tree = wheels.copy_tree(release, folder / "site-packages")
    before = hashes(tree)
    actions.apply(tree, dry_run=False)
    patched = hashes(tree)
    changed = [path for path in changes(before, patched) if path.endswith(".py")]
    compiled = python("-m", "compileall", "-q", *(str(tree / path) for path in changed))
    data = folder / "coverage"
    include = ",".join(f"*/{path.relative_to(OVERLAY)}" for path in OVERLAY_FILES)
    measure = ["run", "--branch", f"--data-file={data}", f"--include={include}"]
    options = ["-q", "-n0", "-p", "no:cacheprovider", "--hypothesis-profile=few"]
    tests = ["-m", "pytest", *options, *map(str, TESTS)]
    if release in BETWEEN and not full:
        tests += [f"--ignore={TESTS[1] / name}" for name in LEFT_OUT]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "SERIES_TREE": str(tree),
    }
    tested = python("-m", "coverage", *measure, *tests, **environment)
    actions.revert(tree, dry_run=False)
    found = {path.name: path.read_text() for path in folder.glob("fingerprint-*")}
    return Run(before, patched, hashes(tree), compiled, tested, data, found)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def changes(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """The files that are new or changed."""
    return {path for path in after if after[path] != before.get(path)}


def hashes(tree: Path) -> dict[str, str]:
    """SHA-256 of every file but compiled ones, by its path."""
    return {
        path.relative_to(tree).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tree.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[dict[str, Future[Run]]]:
    """All releases' runs, as many at a time as there are processors."""
    full = pytestconfig.getoption("full")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        folders = {release: tmp_path_factory.mktemp(release) for release in RELEASES}
        futures = {
            r: pool.submit(run, r, folder, full) for r, folder in folders.items()
        }
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.fixture(params=RELEASES)
def seen(request: pytest.FixtureRequest, runs: dict[str, Future[Run]]) -> Run:
    return runs[request.param].result()


def test_series_changes_what_it_says(seen: Run) -> None:
    """The touched files and the overlay, and beside the tool's own records no more."""
    changed = changes(seen.before, seen.patched)
    ours = {path for path in changed if path.startswith("vllm/")}
    new = {path.relative_to(OVERLAY).as_posix() for path in OVERLAY_FILES}
    assert ours - seen.before.keys() == new
    assert "vllm/v1/worker/block_table.py" in ours
    assert all(
        path.endswith(".dist-info/RECORD") or path.startswith(".vllm_patches/")
        for path in changed - ours
    )


def test_tree_compiles(seen: Run) -> None:
    assert seen.compiled.returncode == 0, seen.compiled.stdout


def test_tree_passes_its_tests(seen: Run) -> None:
    """The overlay's unit tests, and the release's own specs and block tables."""
    assert seen.tested.returncode == 0, seen.tested.stdout[-4000:]
    assert " passed" in seen.tested.stdout


def test_revert_restores_every_hash(seen: Run) -> None:
    assert seen.after == seen.before


def test_the_newest_releases_share(runs: dict[str, Future[Run]]) -> None:
    """Equal pools have equal fingerprints on both, whatever their model runner."""
    default, newest = (runs[r].result().fingerprints for r in ("0.32.0", RELEASES[-1]))
    assert default == newest
    assert len(set(default.values())) == 3, "kernel block sizes are kept apart"


def test_every_branch_of_the_overlay_is_taken(
    runs: dict[str, Future[Run]], tmp_path: Path
) -> None:
    """By one release's tests or another's; all trees hold the same files."""
    config = tmp_path / "coveragerc"
    config.write_text(f"[paths]\nvllm =\n  {OVERLAY / 'vllm'}\n  */vllm\n")
    all_runs = coverage.Coverage(tmp_path / "coverage", config_file=str(config))
    data = [str(run.result().coverage) for run in runs.values()]
    all_runs.combine(data, keep=True)
    files = {str(path) for path in OVERLAY_FILES}
    assert all_runs.get_data().measured_files() == files
    report = tmp_path / "report"
    with report.open("w") as file:
        percent = all_runs.report(show_missing=True, file=file)
    assert percent == 100, report.read_text()
