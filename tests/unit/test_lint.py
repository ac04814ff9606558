"""The hooks of .pre-commit-config.yaml, on all files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout")
def test_hooks_pass(tmp_path: Path) -> None:
    """With the tools of this environment."""
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {
        "PATH": os.pathsep.join(folders),
        "PRE_COMMIT_HOME": str(tmp_path),
    }
    command = [
        sys.executable,
        "-m",
        "pre_commit",
        "run",
        "--all-files",
        "--color=never",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
