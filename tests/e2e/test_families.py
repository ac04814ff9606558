"""The round trip of each family of models, sub-paged."""

from pathlib import Path

import pytest

from scripts.engines import models, roundtrip

FAMILIES = [f for f in models.FAMILIES if f not in ("hybrid", "plain", "deepseek")]


@pytest.mark.full
def test_exact_under_kernel_blocks_of_32(tmp_path: Path) -> None:
    """MLA aside, which the CPU pages by the block, or cannot read from a cache."""
    cases = [roundtrip.Case(family, 32) for family in FAMILIES]
    trips = roundtrip.run(tmp_path, cases)
    assert not {case.model: trip.rows for case, trip in trips.items() if not trip.exact}
    for case, trip in trips.items():
        sizes = {group["kernel_block_size"] for group in trip.groups}
        assert sizes == {32}, case
