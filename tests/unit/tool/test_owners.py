"""Who may read what the tool writes: as the files that it replaces."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from tests.unit.tool.conftest import WORKER, child, ended
from vllm_patches import actions

pytestmark = pytest.mark.usefixtures("small_series")
SOMEBODY = 12345


def owners(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every file and folder below root: its mode, user and group."""
    found = {}
    for path in [root, *root.rglob("*")]:
        now = path.stat()
        mode = stat.S_IMODE(now.st_mode)
        name = path.relative_to(root).as_posix()
        found[name] = (mode, now.st_uid, now.st_gid)
    return found


def test_readable_under_umask_077(small: Path) -> None:
    """An image is built by one user and run by another."""

    def run() -> None:
        os.umask(0o077)
        actions.apply(small, dry_run=False)

    assert ended(child(run, lambda: None)) == 0
    after = owners(small)
    assert after[f"{WORKER}/logical.py"][0] == 0o644
    assert after["vllm/pages/deep"][0] == 0o755
    del after["."]  # pytest's own
    for name, (mode, _, _) in after.items():
        assert mode & 0o044 == 0o044, name


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_root_leaves_a_users_tree_the_users(small: Path) -> None:
    for path in [small, *small.rglob("*")]:
        os.chown(path, SOMEBODY, SOMEBODY)
    before = owners(small)
    actions.apply(small, dry_run=False)
    assert {owner[1:] for owner in owners(small).values()} == {(SOMEBODY, SOMEBODY)}

    def revert() -> None:
        os.setgid(SOMEBODY)
        os.setuid(SOMEBODY)
        actions.revert(small, dry_run=False)

    for parent in small.parents:  # pytest's own folders are root's alone
        if parent.is_relative_to(tempfile.gettempdir()):
            parent.chmod(parent.stat().st_mode | 0o011)
    assert ended(child(revert, lambda: None)) == 0
    assert owners(small) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_root_reverts_to_the_users_files(small: Path) -> None:
    for path in [small, *small.rglob("*")]:
        os.chown(path, SOMEBODY, SOMEBODY)
    before = owners(small)
    actions.apply(small, dry_run=False)
    actions.revert(small, dry_run=False)
    assert owners(small) == before
