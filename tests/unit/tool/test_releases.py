"""Every supported release: patched, verified and put back."""

from pathlib import Path

import pytest

from scripts.series import wheels
from tests.unit.tool.conftest import snapshot
from vllm_patches import actions, releases
from vllm_patches.installation import Installation
from vllm_patches.results import Applied


@pytest.mark.parametrize("bare", [False, True], ids=["installed", "bare"])
@pytest.mark.parametrize("release", releases.RELEASES, ids=lambda r: r.version)
def test_apply_verify_revert(
    release: releases.Release, bare: bool, tmp_path: Path
) -> None:
    tree = wheels.copy_tree(release.version, tmp_path)
    if bare:  # the version is what the tree itself says
        (info,) = tree.glob("*.dist-info")
        info.rename(tree / "kept")
    before = snapshot(tree)
    applied = actions.apply(tree, dry_run=False)
    assert isinstance(applied, Applied)
    assert applied.release == release.version
    assert actions.status(tree).state == "patched"
    assert actions.verify(tree).mismatches == []
    after = snapshot(tree)
    changed = {path for path, data in after.items() if before.get(path) != data}
    assert changed >= {*applied.modified, *applied.new}
    assert {path for path in changed if path.startswith("vllm/")} == (
        {*applied.modified, *applied.new}
    )
    actions.revert(tree, dry_run=False)
    assert snapshot(tree) == before
    if not bare:
        assert Installation.find(tree).mismatches() == []
