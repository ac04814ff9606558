"""A series on another release: what applies, what moved, what conflicts."""

import re
from pathlib import Path

import pytest

from scripts.series import port, refresh, trees, wheels
from vllm_patches import actions
from vllm_patches.errors import PatchesError
from vllm_patches.patch_set import PatchSet

WORKER = "vllm/v1/worker"


@pytest.fixture(autouse=True)
def no_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "TREES", tmp_path / "trees")


def test_port_to_the_next_release() -> None:
    tree, outcomes = port.port("0.32.0", "0.33.0")
    reports = [str(outcome) for outcome in outcomes]
    assert len(reports) == 5
    assert re.search(
        r"^0001.*: conflict: \S+/block_table.py hunk 2 \(line \d+\)", reports[0]
    )
    assert reports[3].endswith(": applies with an offset") or reports[3].endswith(
        ": applies"
    )
    assert not trees.export(tree), "patches behind a conflict are left to merge"
    trees.git(tree, "cat-file", "-e", "refs/0.32.0")
    with pytest.raises(refresh.Refused, match="is there already"):
        port.port("0.32.0", "0.33.0")


def test_port_to_a_sibling_applies_with_offsets() -> None:
    """0.25.1's series fits 0.24.0 but for what 0.24.0 lacks."""
    tree, outcomes = port.port("0.25.1", "0.24.0")
    assert [outcome.applies for outcome in outcomes] == [True, True, True, False, True]
    assert any(outcome.is_moved for outcome in outcomes)
    assert "cpu_model_runner.py hunk 1" in str(outcomes[3])
    assert len(trees.export(tree)) == 3


def test_port_to_an_unknown_release(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(refresh.Refused, match="index has no vLLM 0.32.99"):
        port.port("0.32.0", "0.32.99")
    with pytest.raises(refresh.Refused, match="vLLM 0.31.0 is not supported"):
        port.port("0.31.0", "0.32.0")


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
    ("version", "near"),
    [("0.31.0.dev7+g1234abc", "0.30.0"), ("0.33.1.dev2", "0.33.0")],
)
def test_nightly_is_refused_with_a_report(
    version: str, near: str, tmp_path: Path
) -> None:
    """A tree between two releases: the nearest one, and how far its series fits."""
    tree = wheels.copy_tree("0.32.0", tmp_path / "nightly")
    (metadata,) = tree.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", text))
    with pytest.raises(PatchesError) as refused:
        actions.apply(tree, dry_run=False)
    assert f"vLLM {version} is not supported" in str(refused.value)
    assert f"nearest supported release is {near}" in str(refused.value)
    names = [patch.name for patch in PatchSet.nearest(near).patches]
    assert [line.split(": ")[0] for line in refused.value.details] == names
    assert any(": conflict: vllm/" in line for line in refused.value.details)
    assert not (tree / WORKER / "logical_blocks.py").exists()
