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


@pytest.mark.parametrize(
    ("runner", "kernel_block_sizes"),
    [
        ("v1", [32]),
        pytest.param("v1", [256], marks=pytest.mark.full),
        pytest.param("v2", [32, 256], marks=pytest.mark.full),
    ],
    ids=["v1-32", "v1-256", "v2"],
)
@pytest.mark.parametrize("release", OTHERS)
def test_roundtrip(release: str, runner: str, kernel_block_sizes: list[int]) -> None:
    """Eight kernel blocks a block, and one."""
    command = [sys.executable, "scripts/roundtrip", "--release", release]
    command += ["--runner", runner]
    for size in kernel_block_sizes:
        command += ["--kernel-block-size", str(size)]
    done = subprocess.run(
        command, cwd=environment.ROOT, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Exact on vLLM {release}: every difference is 0.0" in done.stdout
