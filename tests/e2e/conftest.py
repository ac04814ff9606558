"""Real engines, real LMCache servers. One engine runs at a time."""

from pathlib import Path
from typing import Any

import pytest

from scripts.engines import environment, models, roundtrip
from scripts.engines.engine import Job


@pytest.fixture(scope="session")
def hybrid() -> str:
    """Folder of the tiny model with Mamba layers."""
    return str(models.make("hybrid", environment.CACHE / "models"))


@pytest.fixture(scope="session")
def plain() -> str:
    """Folder of the tiny model with attention layers only."""
    return str(models.make("plain", environment.CACHE / "models"))


@pytest.fixture
def make_job(tmp_path: Path):
    """Build a job with its files in the test's folder."""

    def make(name: str, model: str, prompts: list[list[int]], **changes: Any) -> Job:
        engine_args = {
            "block_size": roundtrip.BLOCK_SIZE,
            "num_gpu_blocks_override": 256,
        } | changes.pop("engine_args", {})
        defaults = dict(kernel_block_size=32, engine_args=engine_args)
        return Job(
            name=name,
            model=model,
            prompts=prompts,
            log=str(tmp_path / f"{name}.log"),
            **{**defaults, **changes},
        )

    return make
