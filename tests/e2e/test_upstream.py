"""What is reported upstream happens as it is told, on the vLLM that is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.engines import server

FOLDER = Path(__file__).parents[2] / "vllm_patches" / "upstream"


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_failed_load(policy: str, plain: str) -> None:
    """One failed load, and the next request ends the engine; not with "recompute"."""
    done = subprocess.run(
        [sys.executable, FOLDER / "failed_load.py", plain, policy],
        env=server.engine_env() | {"PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    answers = [s for s in done.stdout.splitlines() if s.startswith("answered")]
    if policy == "recompute":
        assert answers == 2 * ["answered: length"] and done.returncode == 0
    else:
        assert answers == ["answered: error"]
        assert "assert req_id in self.requests" in done.stderr
