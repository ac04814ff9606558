"""Series in memory, checked against git."""

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.series import wheels
from tests.unit.tool.conftest import RELEASE, WORKER, git
from vllm_patches import patch_set, releases
from vllm_patches.errors import PatchesError
from vllm_patches.patch import Patch
from vllm_patches.patch_set import PatchSet


def load() -> PatchSet:
    patch_set = PatchSet.find(RELEASE)
    assert patch_set
    return patch_set


def reader(root: Path):
    return lambda path: (root / path).read_bytes()


def test_applies_as_git_does(small_series: Path, small: Path, patched: Path) -> None:
    files = load().apply(reader(small))
    assert sorted(files) == [f"{WORKER}/block_table.py", f"{WORKER}/worker_base.py"]
    for path, data in files.items():
        assert data == (patched / path).read_bytes()
        assert data != (small / path).read_bytes()


@pytest.mark.parametrize("release", releases.RELEASES, ids=lambda r: r.version)
def test_every_series_applies_as_git_does(
    release: releases.Release, tmp_path: Path
) -> None:
    """The project's own, exported and applied by `git am` to the real release."""
    patch_set = PatchSet.of(release)
    tree = wheels.unpack_python(release.version)
    files = patch_set.apply(reader(tree)) | patch_set.overlay
    for path in patch_set.touched:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((tree / path).read_bytes())
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "As released")
    mail = tmp_path / "overlay.patch"
    mail.write_text(patch_set.overlay_patch())
    patches = [str(path) for path in sorted(release.series.glob("*.patch"))]
    git(tmp_path, "am", "-q", str(mail), *patches)
    for path, data in files.items():
        assert (tmp_path / path).read_bytes() == data


LINE = st.sampled_from(
    ["", " ", "-", "+", "-- ", "--- a/x", "+++ b/x", "@@ -1 +1 @@", "diff --git a b"]
    + ["index 1..2 100644", "Index: x", "def f():", "\tx\t", "é", "-- 2.43.0", "\\ No"]
) | st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=5)


MAIL = """From 0123 Mon Sep 17 00:00:00 2001
From: Someone <someone@example.org>
Subject: [PATCH] diff of a and b

diff this and that
---
 vllm/x.py | 2 +-

"""


@settings(max_examples=100, deadline=None)
@given(st.lists(LINE, min_size=1, max_size=40), st.data())
def test_any_edit_applies_as_git_does(lines: list[str], data: st.DataObject) -> None:
    edited = list(lines)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(edited)))
        size = data.draw(st.integers(0, 3))
        edited[at : at + size] = data.draw(st.lists(LINE, max_size=3))
    old, new = ("\n".join([*text, "last", ""]).encode() for text in (lines, edited))
    if old == new:
        return
    with tempfile.TemporaryDirectory() as name:
        for side, text in (("a", old), ("b", new)):
            path = Path(name) / side / "vllm" / "x.py"
            path.parent.mkdir(parents=True)
            path.write_bytes(text)
        command = ["git", "diff", "--no-index", "--no-prefix", "--text", "a", "b"]
        diff = subprocess.run(command, cwd=name, capture_output=True).stdout.decode()
    patch = f"{MAIL}{diff}-- \n2.43.0\n\n"
    patch_set = PatchSet("1", [Patch("0001.patch", patch)], {})
    assert patch_set.apply(lambda path: old) == {"vllm/x.py": new}


def test_report_names_file_and_hunk(small_series: Path, small: Path) -> None:
    """Moved lines still apply, changed ones do not."""
    path = small / WORKER / "block_table.py"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:100], "# moved", *lines[100:]]))
    first, second = load().report(reader(small))
    assert first == "0001-Two-hunks-in-one-file.patch: applies with an offset"
    assert second.endswith(": applies")
    with pytest.raises(PatchesError, match="block_table.py hunk 2 .* does not match"):
        load().apply(reader(small))
    path.write_text("\n".join([*lines[:202], "# changed", *lines[203:]]))
    first, second = load().report(reader(small))
    assert first == (
        "0001-Two-hunks-in-one-file.patch: conflict: "
        f"{WORKER}/block_table.py hunk 2 (line 198)"
    )
    assert second.endswith(f": conflict: {WORKER}/block_table.py hunk 1 (line 1)")
    (small / WORKER / "worker_base.py").unlink()
    assert "worker_base.py hunk 1 (line 1)" in load().report(reader(small))[1]


def test_patch_may_only_modify(patched: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "vllm-src"
    git(tmp_path, "clone", "-q", str(patched), str(checkout))
    (checkout / "vllm" / "new.py").write_text("x = 1\n")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "Adds a file")
    text = git(checkout, "format-patch", "--stdout", "-1")
    with pytest.raises(
        PatchesError, match="does more to vllm/new.py than to modify it"
    ):
        Patch("0001.patch", text).hunks  # noqa: B018


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", "0.32.0"),
        ("0.32.1.dev3+gabc", "0.32.0"),
        ("0.29.0", "0.28.0"),
        ("0.31.0.dev1", "0.30.0"),
        ("0.33.0rc1", "0.32.0"),
        ("1.0.0", "0.32.0"),
        ("0.2", "0.28.0"),
    ],
)
def test_nearest(
    version: str, expected: str, small_series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supported = []
    for each in ("0.28.0", "0.30.0", "0.32.0"):
        supported.append(releases.Release(each, "2", (), "pooled", engine=False))
        if each != RELEASE:
            (small_series.parent / f"v{each}").symlink_to(small_series)
    monkeypatch.setattr(releases, "RELEASES", tuple(supported))
    assert PatchSet.nearest(version).version == expected


def test_local_tag_is_no_other_release(small_series: Path) -> None:
    assert PatchSet.find("0.32.0+cu129")
    assert not PatchSet.find("0.32.0.dev1")
    assert not PatchSet.find("0.32.0rc1")
    assert not PatchSet.find("0.32.0.post1")


def test_empty_series_is_told(small_series: Path) -> None:
    for path in small_series.iterdir():
        path.unlink()
    with pytest.raises(PatchesError, match="no patches in .*reinstall"):
        load()


def test_a_series_is_what_its_list_says(small_series: Path) -> None:
    """A patch that an earlier build left behind is not read; a lost or changed one is
    told."""
    first, second = sorted(small_series.glob("*.patch"))
    (small_series / "0003-stale.patch").write_text("From an earlier build")
    assert [patch.name for patch in load().patches] == [first.name, second.name]
    text = first.read_text()
    first.write_text(text + "\n")
    with pytest.raises(PatchesError, match=f"{first.name} is not as listed"):
        load()
    first.unlink()
    with pytest.raises(PatchesError, match=f"{first.name} is missing in .*; reinstall"):
        load()


def test_the_overlay_is_what_its_list_says(small_series: Path) -> None:
    worker = patch_set.OVERLAY / WORKER
    (worker / "dropped.py").write_text("stale = True\n")
    assert f"{WORKER}/dropped.py" not in load().overlay
    (worker / "logical.py").write_text("CONTRACT_VERSION = 8\n")
    with pytest.raises(PatchesError, match="logical.py is not as listed"):
        load()
