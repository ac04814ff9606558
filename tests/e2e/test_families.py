"""The round trip of each family of models, sub-paged."""

from pathlib import Path

import pytest

from scripts.engines import models, roundtrip

DEFAULT = "hybrid-ngram"
# MLA aside, which the CPU pages by the block, or cannot read from a cache.
LEFT_OUT = ("hybrid", "plain", "deepseek", DEFAULT)


def check(folder: Path, families: list[str]) -> None:
    cases = [roundtrip.Case(family, 32) for family in families]
    trips = roundtrip.run(folder, cases)
    assert not {case.model: trip.rows for case, trip in trips.items() if not trip.exact}
    for case, trip in trips.items():
        attention = [g for g in trip.groups if g["kind"] != "MambaSpec"]
        assert {group["kernel_block_size"] for group in attention} == {32}, case


def test_speculation_on_a_hybrid(tmp_path: Path) -> None:
    """A Mamba group's table holds blocks for drafts, which vLLM moves."""
    check(tmp_path, [DEFAULT])


@pytest.mark.full
def test_exact_under_kernel_blocks_of_32(tmp_path: Path) -> None:
    check(tmp_path, [family for family in models.FAMILIES if family not in LEFT_OUT])
