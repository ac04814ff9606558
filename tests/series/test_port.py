"""A series on another release: what applies, what moved, what conflicts."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from scripts.series import port, refresh, trees, wheels
from scripts.series.merge import Merged, merge
from vllm_patches import actions, releases, sums
from vllm_patches.errors import PatchesError
from vllm_patches.patch_set import PatchSet

WORKER = "vllm/v1/worker"


@pytest.fixture(autouse=True)
def no_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "TREES", tmp_path / "trees")


@pytest.fixture
def without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], dict[str, bytes]]:
    """Forget a release; its series, as it is here, is what a port should come to."""

    def forget(version: str) -> dict[str, bytes]:
        release = releases.find(version)
        assert release
        series = refresh.read(release.series)
        copy = shutil.copytree(releases.SERIES, tmp_path / "series")
        shutil.rmtree(copy / f"v{version}")
        rest = tuple(each for each in releases.RELEASES if each != release)
        monkeypatch.setattr(releases, "SERIES", copy)
        monkeypatch.setattr(releases, "RELEASES", rest)
        return series

    return forget


def verdicts(merged: list[Merged]) -> list[str]:
    return [each.verdict for each in merged]


@pytest.mark.parametrize(
    ("version", "best", "expected"),
    [
        ("0.25.0", "0.25.1", ["fits"] * 5),
        ("0.27.1", "0.27.0", ["fits"] * 5),
        ("0.27.0", "0.27.1", ["fits"] * 5),
    ],
)
def test_port_writes_the_series(
    version: str, best: str, expected: list[str], without: Callable
) -> None:
    series = without(version)
    patch_set, merged = port.port(version)
    assert (patch_set.version, verdicts(merged)) == (best, expected)
    assert refresh.read(releases.SERIES / f"v{version}") == series
    assert sums.read(releases.SERIES / f"v{version}") == series
    with pytest.raises(refresh.Refused, match="is there already"):
        port.port(version)


def test_port_merges_three_ways(without: Callable) -> None:
    """0.28.0's third patch conflicts with 0.27.1's lines; git merges it."""
    series = without("0.27.1")
    _, merged = port.port("0.27.1", "0.28.0")
    assert verdicts(merged) == ["fits", "moved", "merged", "fits", "moved"]
    assert "gpu_model_runner.py hunk" in str(merged[2].outcome)
    assert refresh.read(releases.SERIES / "v0.27.1") == series


def test_port_stops_in_a_conflict(
    without: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    """The hunks' text is shown, and the tree waits where a person goes on."""
    without("0.31.0")
    with pytest.raises(typer.Exit) as ended:
        port.main(["0.31.0"], "0.30.0", only_watch=False)
    assert ended.value.exit_code == 1
    printed = capfd.readouterr().out
    assert "0005-KVConnector-Allocate-the-KV-cache-in-the" in printed
    assert "    ++<<<<<<< HEAD\n" in printed
    assert "    ++>>>>>>> [KVConnector] Allocate the KV cache in" in printed
    assert not (releases.SERIES / "v0.31.0").exists()
    tree = trees.path("0.31.0")
    assert len(trees.export(tree)) == 4
    assert trees.unfinished(tree)
    assert trees.git(tree, "diff", "--name-only", "--diff-filter=U")
    trees.git(tree, "am", "--skip")
    assert not trees.unfinished(tree)


def test_watch(without: Callable, tmp_path: Path) -> None:
    """A line each, of a release and of a nightly's wheel; nothing is written."""
    without("0.31.0")
    nightly = wheels.copy_tree("0.32.0", tmp_path / "nightly")
    wheel = tmp_path / "vllm-0.32.1.dev7+g1234abc-cp38-abi3-manylinux_2_28_x86_64.whl"
    wheels.pack(nightly, wheel)
    release, build = port.watch(["0.31.0", str(wheel)])
    assert release == ("0.31.0 (from 0.30.0): moved 1, 4; merged 2, 3; conflicts 5")
    assert build == "0.32.1.dev7+g1234abc (from 0.32.0): fits 1, 2, 3, 4, 5"
    assert not trees.path("0.31.0").exists()


def test_merge_knows_what_is_upstream() -> None:
    pristine = wheels.unpack_python("0.32.0")
    patch_set = PatchSet.nearest("0.32.0")

    def read(path: str) -> bytes:
        return (pristine / path).read_bytes()

    patched = patch_set.apply(read)
    assert verdicts(merge(patch_set, read, lambda path: patched[path])) == (
        ["upstream"] * 5
    )


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("nightly", "nightly is no version and no wheel's file; give 0.34.0"),
        ("vllm.whl", "vllm.whl is no version and no wheel's file"),
        ("vllm-0.34.0rc1-py3-none-any.whl", "cannot be read"),
        ("0.32.99", "the package index has no vLLM 0.32.99"),
        ("0.32.0", "vLLM 0.32.0 has a series: `scripts/refresh 0.32.0`"),
    ],
)
def test_port_refuses(
    target: str, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one line, nothing left behind."""
    with pytest.raises(typer.Exit) as ended:
        port.main([target], None, only_watch=False)
    assert ended.value.exit_code == 1
    lines = capfd.readouterr().err.splitlines()
    assert told in " ".join(lines)
    assert "Traceback" not in " ".join(lines)
    assert not trees.TREES.exists() or not list(trees.TREES.iterdir())


def test_port_from_an_unsupported_release(without: Callable) -> None:
    without("0.27.1")
    with pytest.raises(refresh.Refused, match="vLLM 0.2.0 is not supported"):
        port.port("0.27.1", "0.2.0")


def test_report_knows_what_is_upstream() -> None:
    """A release that has a patch already does not get it twice."""
    release = PatchSet.nearest("0.32.0")
    pristine = wheels.unpack_python("0.32.0")
    patched = release.apply(lambda path: (pristine / path).read_bytes())
    again = release.report(lambda path: patched[path])
    assert again == [f"{patch.name}: already upstream" for patch in release.patches]


def test_report_finds_moved_lines() -> None:
    release = PatchSet.nearest("0.30.0")
    pristine = wheels.unpack_python("0.30.0")

    def read(path: str) -> bytes:
        return b"# one more line\n" + (pristine / path).read_bytes()

    assert release.report(read) == [
        f"{patch.name}: applies with an offset" for patch in release.patches
    ]


@pytest.mark.parametrize(
    ("files", "version"),
    [("0.32.0", "0.31.0.dev7+g1234abc"), ("0.32.0", "0.33.1.dev2")],
)
def test_nightly_is_refused_with_a_report(
    files: str, version: str, tmp_path: Path
) -> None:
    """A build between two releases: the series that fits it best, not its number's."""
    tree = wheels.copy_tree(files, tmp_path / "nightly")
    (metadata,) = tree.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", text))
    with pytest.raises(PatchesError) as refused:
        actions.apply(tree, dry_run=False)
    assert f"vLLM {version} is not supported" in str(refused.value)
    assert f"its series fits, `--release {files}` applies it" in str(refused.value)
    names = [patch.name for patch in PatchSet.nearest(files).patches]
    assert refused.value.details == [f"{name}: applies" for name in names]
    assert not (tree / WORKER / "logical_blocks.py").exists()
