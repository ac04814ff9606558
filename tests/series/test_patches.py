"""The patch files: small, in one form, and as the support table says."""

import re
from email.parser import HeaderParser
from pathlib import Path

import pytest

from scripts.series import trees
from vllm_patches import releases, sums
from vllm_patches.patch_set import OVERLAY, PatchSet

ROOT = Path(__file__).parents[2]
MAX_PATCHES = 6
MAX_CHANGED_LINES = 200
FIELDS = ("Description", "Forwarded", "Applied-Upstream", "Last-Update")
"""DEP-3 lines that every patch's message ends with."""


@pytest.fixture(params=releases.RELEASES, ids=lambda release: release.version)
def series(request: pytest.FixtureRequest) -> PatchSet:
    return PatchSet.of(request.param)


def test_table_and_folders_agree() -> None:
    folders = {path.name for path in releases.SERIES.iterdir()}
    assert folders == {release.series.name for release in releases.RELEASES}


@pytest.mark.parametrize(
    "folder", [OVERLAY, *(release.series for release in releases.RELEASES)], ids=str
)
def test_list_names_every_file(folder: Path) -> None:
    """`scripts/refresh` writes it; that the hashes are right is checked when read."""
    files = {path for path in folder.rglob("*") if path.suffix in (".py", ".patch")}
    assert {folder / name for name in sums.read(folder)} == files


def test_series_is_small(series: PatchSet) -> None:
    changed = [
        line
        for patch in series.patches
        for line in patch.text.splitlines()
        if re.match(r"[+-](?!\+\+ b/|-- a/)", line)
    ]
    assert len(series.patches) <= MAX_PATCHES
    assert 0 < len(changed) <= MAX_CHANGED_LINES


def test_no_patch_touches_the_overlay(series: PatchSet) -> None:
    assert not series.overlay.keys() & set(series.touched)


def test_patch_says_why_and_when_it_goes(series: PatchSet) -> None:
    for patch in series.patches:
        mail = HeaderParser().parsestr(patch.text)
        assert " ".join(mail["From"].split()) == f"{trees.AUTHOR} <{trees.EMAIL}>"
        message = str(mail.get_payload()).split("\ndiff --git ")[0]
        for field in FIELDS:
            assert re.search(rf"^{field}: \S", message, re.MULTILINE), patch.name
        assert re.search(r"^Goes (when|with) ", message, re.MULTILINE), patch.name


def test_readme_has_the_support_matrix() -> None:
    readme = (ROOT / "README.md").read_text()
    assert releases.with_matrix(readme) == readme
