"""Fixtures shared by all tests."""

from pathlib import Path

import pytest

from scripts.series import wheels


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A site-packages folder with vLLM 0.32.0's Python files, free to change."""
    return wheels.copy_tree("0.32.0", tmp_path / "site-packages")
