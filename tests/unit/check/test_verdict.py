"""What is made of the notes and the answers."""

import json
import math
from typing import Any

import pytest

from vllm_patches.check import verdict
from vllm_patches.check.verdict import Answer, Checked, Geometry, Group, Moved

ABOUT = {
    "note": "group",
    "rank": 0,
    "kind": "FullAttentionSpec",
    "layers": 2,
    "block_size": 256,
    "kernel_block_size": 32,
    "page_size_bytes": 4096,
}


def page(what: str, digest: str = "same", **changes: Any) -> dict[str, Any]:
    note = {"note": "page", "what": what, "rank": 0, "piece": 0, "group": 0}
    note |= {"layer": "layers.0", "end": 256, "prefix": "p", "digest": digest}
    return note | changes


def compare(stored: list[Any], loaded: list[Any]) -> tuple[int, int, int]:
    (group,) = verdict.compare_pages(stored, [ABOUT | {"group": 0}, *loaded])
    assert group.blocks_per_kv_block == 8
    return group.compared, group.wrong, group.unknown


def test_pages_that_agree() -> None:
    stored = [page("stored"), page("stored", "other", end=512)]
    loaded = [page("loaded"), page("loaded", "other", end=512)]
    assert compare(stored, loaded) == (2, 0, 0)


def test_another_digest_is_wrong() -> None:
    assert compare([page("stored")], [page("loaded", "other")]) == (1, 1, 0)


@pytest.mark.parametrize("key", ["piece", "group", "layer", "end", "prefix"])
def test_a_page_is_known_by_all_of_its_identity(key: str) -> None:
    """What was never stored as that page is told apart from what is wrong."""
    changes: dict[str, Any] = {key: 99}
    stored = [page("stored", **changes)]
    assert compare(stored, [page("loaded")]) == (1, 0, 1)


def test_what_is_stored_while_loading_does_not_count() -> None:
    assert compare([page("loaded")], [page("loaded")]) == (1, 0, 1)
    assert compare([page("stored")], [page("stored")]) == (0, 0, 0)


def test_ranks_are_compared_piece_by_piece() -> None:
    stored = [page("stored", "a", piece=0), page("stored", "b", piece=1, rank=1)]
    loaded = [page("loaded", "a", piece=0), page("loaded", "a", piece=1, rank=1)]
    assert compare(stored, loaded) == (2, 1, 0)


def test_seconds_are_the_slowest_rank_s() -> None:
    def note(**changes: Any) -> dict[str, Any]:
        return {"note": "moved", "what": "loaded", "rank": 0, "bytes": 10} | changes

    notes = [
        note(seconds=1.0, succeeded=True),
        note(seconds=2.0, succeeded=True),
        note(seconds=4.0, succeeded=False, rank=1),
        note(seconds=9.0, succeeded=True, what="stored"),
    ]
    assert verdict.moved(notes, "loaded") == Moved(30, 4.0, 1)
    assert verdict.moved([], "loaded") == Moved(0, 0.0, 0)


def answer(*steps: dict[int, float]) -> Answer:
    return Answer(0, [max(step, key=step.__getitem__) for step in steps], [*steps])


def test_difference_is_the_largest_of_any_token_and_step() -> None:
    a = answer({1: -0.1, 2: -3.0}, {5: -0.2, 6: -2.0})
    b = answer({1: -0.1, 2: -3.25}, {5: -0.3, 7: -9.0})
    assert verdict.difference([a], [a]) == 0.0
    assert verdict.difference([a], [b]) == 0.25


def test_difference_ends_where_answers_go_apart() -> None:
    a = answer({1: -0.5, 2: -0.75}, {5: -0.1})
    b = answer({2: -0.5, 1: -0.75}, {5: -0.9})
    assert verdict.difference([a], [b]) == 0.25
    assert verdict.difference([answer({1: -0.5})], [answer({2: -0.5})]) == math.inf


def test_nan_is_the_largest_difference() -> None:
    a, b = answer({1: -0.5}), answer({1: math.nan})
    assert math.isnan(verdict.difference([a, a], [b, a]))


def checked(
    served: tuple[int, ...] = (768, 1024),
    failed: int = 0,
    difference: float = 0.0,
    **counts: int,
) -> Checked:
    counts = {"compared": 12, "wrong": 0, "unknown": 0} | counts
    return Checked(
        model="a model",
        connector="LogicalConnector",
        chunk_size=256,
        prompts=2,
        served=list(served),
        difference=difference,
        own_difference=0.0,
        stored=Moved(2_500_000, 1.25, 0),
        loaded=Moved(2_500_000, 0.5, failed),
        groups=[Group(0, "MambaSpec", 3, 256, 1, 4096, **counts)],
    )


def test_right_is_exit_status_0() -> None:
    assert checked().error is None
    assert not checked().failed


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"wrong": 3}, "3 of 12 pages hold other bytes than stored"),
        ({"unknown": 2}, "2 were never stored"),
        ({"compared": 0}, "0 pages: nothing is shown"),
        ({"served": (768, 0)}, "served 768, 0 tokens of 2 prompts"),
        ({"failed": 1}, "1 loads failed"),
    ],
)
def test_anything_else_is_not(changes: dict[str, Any], error: str) -> None:
    result = checked(**changes)
    assert error in (result.error or "")
    assert result.failed


def test_lines() -> None:
    assert checked(wrong=1, unknown=2, failed=1).lines() == [
        "0\tMambaSpec\t3\t256\t1\t12\t1, 2 never stored",
        "tokens served from LMCache: 768, 1024 (chunks of 256)",
        "largest log-prob difference: 0",
        "from one run without LMCache to the next: 0",
        "stored: 2.5 MB in 1.25 s",
        "loaded: 2.5 MB in 0.50 s, 1 transfers failed",
    ]


@pytest.mark.parametrize("value, said", [(0.5, 0.5), (math.nan, "nan")])
def test_document_is_json(value: float, said: Any) -> None:
    document = checked(difference=value).document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["difference"] == said


def geometry(stray: int = 0, failure: str = "", **counts: int) -> Geometry:
    counts = {"compared": 12, "wrong": 0, "unknown": 0} | counts
    groups = [Group(0, "FullAttentionSpec", 2, 256, 8, 4096, **counts)]
    return Geometry("sub-paged", "LBHNC", groups, stray, failure)


@pytest.mark.parametrize(
    "changes", [{"stray": 1}, {"failure": "refused"}, {"wrong": 1}, {"compared": 0}]
)
def test_geometry_that_is_not_right(changes: dict[str, Any]) -> None:
    assert verdict.PagesChecked("cpu", [geometry()]).error is None
    result = verdict.PagesChecked("cpu", [geometry(), geometry(**changes)])
    assert result.error == "wrong: sub-paged, LBHNC"


def test_what_is_left_out_is_said_and_shows_nothing() -> None:
    left_out = Geometry("padded", "LBHNC", [], 0, left_out="not on a CPU")
    result = verdict.PagesChecked("cpu", [geometry(), left_out])
    assert result.error is None
    assert result.notes() == [
        "1 KV caches on cpu, 12 pages",
        "padded, LBHNC: left out, not on a CPU",
    ]
    assert verdict.PagesChecked("cpu", [left_out]).error == "nothing is shown"
