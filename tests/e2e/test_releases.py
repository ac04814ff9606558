"""The round trip on the other releases, each in an environment of its own.

The other end-to-end tests run on the default release (test_roundtrip.py its trips).
"""

import subprocess
import sys

import pytest

from scripts.engines import environment
from vllm_patches import releases

OTHERS = [
    release.version
    for release in releases.RELEASES
    if release.engine and release.version != releases.default().version
]


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("release", OTHERS)
def test_roundtrip(release: str, runner: str) -> None:
    """One and eight kernel blocks a block."""
    command = [sys.executable, "scripts/roundtrip", "--release", release]
    command += ["--runner", runner]
    command += ["--kernel-block-size", "32", "--kernel-block-size", "256"]
    done = subprocess.run(
        command, cwd=environment.ROOT, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Exact on vLLM {release}: every difference is 0.0" in done.stdout
