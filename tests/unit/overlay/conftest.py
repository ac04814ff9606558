"""Counts for the report, and hypothesis' profile."""

from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch

# Read at LMCache's import. Engines that other tests start shall log as usual.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("LMCACHE_LOG_LEVEL", "ERROR")
    from tests.unit.overlay.lmcache import Opinion

torch.set_num_threads(1)  # small tensors: more threads only wait for each other

hypothesis.settings.register_profile(
    "overlay", deadline=None, derandomize=True, print_blob=False, max_examples=200
)
hypothesis.settings.register_profile(
    "few", deadline=None, derandomize=True, print_blob=False, max_examples=20
)
hypothesis.settings.load_profile("overlay")


@dataclass
class Tally:
    """What the tests of this folder have gone through."""

    geometries: int = 0
    examples: int = 0
    judged: int = 0
    right: int = 0
    wrong: int = 0
    refused: int = 0

    def add(self, opinion: Opinion) -> None:
        """Count one case by LMCache's own edits: right only if for all layers."""
        self.judged += 1
        if opinion.refused:
            self.refused += 1
        elif opinion.wrong:
            self.wrong += 1
        else:
            self.right += 1


TALLY = pytest.StashKey[Tally]()


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    return pytestconfig.stash.setdefault(TALLY, Tally())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    tally = config.stash.get(TALLY, None)
    if tally is None:
        return
    terminalreporter.section("views of the KV cache")
    terminalreporter.line(
        f"{tally.geometries} geometries and {tally.examples} random examples: every "
        "view is its page, byte for byte"
    )
    terminalreporter.line(
        f"LMCache took our views of all {tally.judged} cases it judged; its own edits "
        f"address the same bytes in {tally.right}, refuse {tally.refused} and get "
        f"{tally.wrong} wrong"
    )
