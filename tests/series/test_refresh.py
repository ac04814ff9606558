"""Patch files become commits and come back, byte for byte."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.series import refresh, trees
from vllm_patches import releases

RELEASE = "0.32.0"
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"


def round_trip(release: releases.Release, tree: Path) -> dict[str, bytes]:
    trees.make(release.version, refresh.read(release.series).values(), tree)
    exported = trees.export(tree)
    shutil.rmtree(tree)
    return exported


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[dict[str, bytes]]]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = tmp_path_factory.mktemp("trees")
        yield {
            release.version: pool.submit(round_trip, release, folder / release.version)
            for release in releases.RELEASES
        }


@pytest.mark.parametrize("release", releases.RELEASES, ids=lambda r: r.version)
def test_series_is_byte_stable(
    release: releases.Release, exported: dict[str, Future[dict[str, bytes]]]
) -> None:
    """`git am` takes every patch, and `git format-patch` gives the same file."""
    assert exported[release.version].result() == refresh.read(release.series)


@pytest.fixture
def series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the series and no trees yet."""
    copy = tmp_path / "series"
    shutil.copytree(releases.SERIES / f"v{RELEASE}", copy / f"v{RELEASE}")
    monkeypatch.setattr(releases, "SERIES", copy)
    monkeypatch.setattr(trees, "TREES", tmp_path / "trees")
    return copy / f"v{RELEASE}"


def test_refresh(series: Path) -> None:
    before = refresh.read(series)
    where, _ = refresh.refresh(RELEASE)
    tree = trees.path(RELEASE)
    assert where.startswith(str(tree))
    assert refresh.refresh(RELEASE) == [f"{series}: 5 patches, nothing changed"]
    assert refresh.read(series) == before

    (tree / BASE).write_text((tree / BASE).read_text() + "# edited\n")
    with pytest.raises(refresh.Refused, match="not committed"):
        refresh.refresh(RELEASE)
    trees.git(tree, "commit", "--quiet", "--all", "-m", "[Test] An edit")
    assert refresh.refresh(RELEASE) == ["wrote 0006-Test-An-edit.patch"]
    assert b"+# edited" in refresh.read(series)["0006-Test-An-edit.patch"]
    trees.git(tree, "reset", "--quiet", "--hard", "HEAD~1")
    assert refresh.refresh(RELEASE) == ["removed 0006-Test-An-edit.patch"]
    assert refresh.read(series) == before


def test_refresh_notices_other_edits(series: Path) -> None:
    """Patch files that changed meanwhile are taken over, but never lost."""
    refresh.refresh(RELEASE)
    tree = trees.path(RELEASE)
    last = sorted(series.glob("*.patch"))[-1]
    text = last.read_bytes()
    last.unlink()
    (first, *_) = refresh.refresh(RELEASE)
    assert first == "The patch files changed since the tree was made."
    assert len(trees.export(tree)) == 4
    last.write_bytes(text)
    (tree / BASE).write_text((tree / BASE).read_text() + "# edited\n")
    trees.git(tree, "commit", "--quiet", "--all", "-m", "[Test] An edit")
    with pytest.raises(refresh.Refused, match="both .* changed"):
        refresh.refresh(RELEASE)
    assert last.exists()


@pytest.mark.parametrize(
    ("release", "near"), [("0.31.1", "0.31.0"), ("0.34.0", "0.33.0"), ("9", "0.33.0")]
)
def test_refresh_refuses_an_unknown_release(
    release: str, near: str, series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with pytest.raises(refresh.Refused) as refused:
        refresh.refresh(release)
    assert f"vLLM {release} is not supported" in str(refused.value)
    assert f"nearest supported release is {near}" in str(refused.value)


def test_the_tree_imports_the_overlay(series: Path) -> None:
    """The overlay's files are links, out of git's sight."""
    refresh.refresh(RELEASE)
    tree = trees.path(RELEASE)
    assert (tree / "vllm/v1/worker/logical_blocks.py").is_symlink()
    assert not trees.unfinished(tree)
