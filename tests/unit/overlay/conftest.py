"""Counts for the report, and hypothesis' profile."""

from collections import Counter

import hypothesis
import pytest
import torch

from tests.conftest import TALLY

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


class Tally:
    """Counts what the tests of this folder go through, for the report."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def geometry(self) -> None:
        self._counts["geometries"] += 1

    def example(self) -> None:
        self._counts["examples"] += 1

    def add(self, opinion: Opinion) -> None:
        """Count one case by LMCache's own edits: right only if for all layers."""
        self._counts["judged"] += 1
        if opinion.refused:
            self._counts["refused"] += 1
        else:
            self._counts["wrong" if opinion.wrong else "right"] += 1


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    return Tally(pytestconfig.stash[TALLY])
