"""The overlay is one file for all releases, and these tests take its every branch.

The other modules run again under coverage, in a process of their own per release: on
the vLLM of this environment, and on the trees of releases whose KV cache config, specs
or bound tensors differ from it.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import coverage
import pytest
import vllm

from scripts.series import wheels

FOLDER = Path(__file__).parent
ROOT = Path(__file__).parents[3]
MODULES = ["kinds", "layouts", "refusals", "geometries", "fingerprint"]
OVERLAY = Path("vllm", "v1", "worker", "logical_blocks.py")
OTHER_RELEASES = ["0.25.1", "0.28.0", "0.30.0"]
"""Mamba states one by one; compress_ratio; a layer's own kernel block size."""


def run(path: Path, data: Path) -> None:
    """Run the modules with the vLLM on ``path``; writes coverage data."""
    command = [sys.executable, "-m", "coverage", "run", "--branch"]
    command += [f"--data-file={data}", f"--include=*/{OVERLAY}", "-m", "pytest"]
    command += ["-q", "-p", "no:cacheprovider", "--hypothesis-profile=few"]
    command += [str(FOLDER / f"test_{module}.py") for module in MODULES]
    paths = [str(path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def run_tree(release: str, folder: Path, data: Path) -> None:
    """Run the modules in the release's pristine tree, the overlay beside."""
    tree = wheels.copy_tree(release, folder)
    shutil.copy(ROOT / "vllm_patches" / "overlay" / OVERLAY, tree / OVERLAY)
    run(tree, data)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("coverage")


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, data: Path
) -> Iterator[dict[str, Future[None]]]:
    """The runs of all releases, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        here = Path(vllm.__file__).parents[1]
        futures = {"this": pool.submit(run, here, data / "this")}
        for release in OTHER_RELEASES:
            folder = tmp_path_factory.mktemp(release)
            futures[release] = pool.submit(run_tree, release, folder, data / release)
        yield futures


@pytest.mark.parametrize("release", ["this", *OTHER_RELEASES])
def test_release(release: str, runs: dict[str, "Future[None]"]) -> None:
    runs[release].result()


def test_every_branch_is_taken(data: Path, runs: dict[str, "Future[None]"]) -> None:
    """All trees hold the same file: their data is read as that of one."""
    config = data / "coveragerc"
    overlay = ROOT / "vllm_patches" / "overlay"
    config.write_text(
        f"[run]\nbranch = true\n[paths]\nvllm =\n  {overlay / 'vllm'}\n  */vllm\n"
    )
    both = coverage.Coverage(data_file=str(data / "all"), config_file=str(config))
    both.combine([str(data / name) for name in ("this", *OTHER_RELEASES)], keep=True)
    report = data / "report"
    with report.open("w") as file:
        percent = both.report(
            include=[str(overlay / OVERLAY)], show_missing=True, file=file
        )
    print(report.read_text())
    assert percent == 100, report.read_text()
