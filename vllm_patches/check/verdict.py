"""Which pages agree, and how far answers differ."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_patches.results import Rows


@dataclass
class Answer:
    cached_tokens: int
    token_ids: list[int]
    top: list[dict[Any, float]]
    """Step by step, log-probabilities of the likeliest tokens, by token id."""


@dataclass(frozen=True)
class Group:
    """The pages of one KV cache group, of all ranks."""

    group: int
    kind: str
    """vLLM's class of spec."""
    layers: int
    """Of one rank."""
    block_size: int
    """Tokens per block id."""
    blocks_per_kv_block: int
    """Kernel pages per page, k."""
    page_size_bytes: int
    compared: int
    """Pages that were loaded."""
    wrong: int
    """Pages that hold other bytes than were stored."""
    unknown: int
    """Pages that were loaded, and never stored."""


@dataclass(frozen=True)
class Moved:
    """What went one way, all ranks together."""

    bytes: int
    seconds: float
    """Sum over transfers, of the slowest rank's."""
    failed: int
    """Transfers that LMCache answered with an error."""


def read_notes(files: Iterable[Path]) -> list[dict[str, Any]]:
    """What all workers of an engine noted (audit.py)."""
    lines = (line for file in sorted(files) for line in file.read_text().splitlines())
    return [json.loads(line) for line in lines]


def compare_pages(
    stores: Sequence[dict[str, Any]], retrieves: Sequence[dict[str, Any]]
) -> list[Group]:
    """Hold what was loaded by one engine against what another one stored."""
    digests = {_identity(n): n["digest"] for n in stores if _is_page(n, "stored")}
    groups = {n["group"]: n for n in retrieves if n["note"] == "group"}
    counts = {group: [0, 0, 0] for group in groups}
    for note in retrieves:
        if _is_page(note, "loaded"):
            digest = digests.get(_identity(note))
            count = counts[note["group"]]
            count[0] += 1
            count[1] += digest is not None and digest != note["digest"]
            count[2] += digest is None
    return [
        Group(
            group,
            about["kind"],
            about["layers"],
            about["block_size"],
            about["block_size"] // about["kernel_block_size"],
            about["page_size_bytes"],
            *counts[group],
        )
        for group, about in sorted(groups.items())
    ]


def _is_page(note: dict[str, Any], what: str) -> bool:
    return note["note"] == "page" and note["what"] == what


def _identity(note: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(note[key] for key in ("piece", "group", "layer", "end", "prefix"))


def moved(notes: Sequence[dict[str, Any]], what: str) -> Moved:
    """What an engine stored, or loaded."""
    done = [n for n in notes if n["note"] == "moved" and n["what"] == what]
    seconds: dict[int, float] = {}
    for note in done:
        rank = note["rank"]
        seconds[rank] = seconds.get(rank, 0.0) + note["seconds"]
    return Moved(
        sum(note["bytes"] for note in done),
        max(seconds.values(), default=0.0),
        sum(not note["succeeded"] for note in done),
    )


def difference(answers: Sequence[Answer], others: Sequence[Answer]) -> float:
    """The largest difference of a token's log-probability, NaN if either is.

    Of every step, the likeliest tokens that both have; steps count up to the first at
    which the answers go apart.
    """
    largest = 0.0
    for answer, other in zip(answers, others, strict=True):
        steps = zip(answer.token_ids, other.token_ids, answer.top, other.top)
        for token, other_token, top, other_top in steps:
            for both in top.keys() & other_top.keys():
                apart = abs(top[both] - other_top[both])
                if math.isnan(apart):
                    return apart
                largest = max(largest, apart)
            if token != other_token:
                if not top.keys() & other_top.keys():
                    return math.inf
                break
    return largest


@dataclass(frozen=True)
class Checked(Rows):
    """What one engine stored, and what another one made of it."""

    header = (
        "group",
        "kind",
        "layers",
        "block size",
        "k",
        "pages compared",
        "pages wrong",
    )
    model: str
    connector: str
    chunk_size: int
    """Tokens per LMCache chunk."""
    prompts: int
    served: list[int]
    """Tokens of each prompt that came from LMCache."""
    difference: float
    """Largest log-prob difference of an answer from LMCache and one from vLLM's own
    prefix cache; NaN and infinity included."""
    own_difference: float
    """The same, of two answers from vLLM's own prefix cache."""
    stored: Moved
    loaded: Moved
    groups: list[Group] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        # JSON has no NaN and no infinity.
        document = super().document()
        for key in ("difference", "own_difference"):
            if not math.isfinite(document[key]):
                document[key] = str(document[key])
        return document

    def rows(self) -> list[tuple[str, ...]]:
        return [
            (
                str(g.group),
                g.kind,
                str(g.layers),
                str(g.block_size),
                str(g.blocks_per_kv_block),
                str(g.compared),
                f"{g.wrong}" + (f", {g.unknown} never stored" if g.unknown else ""),
            )
            for g in self.groups
        ]

    def notes(self) -> list[str]:
        served = ", ".join(map(str, self.served))
        return [
            f"tokens served from LMCache: {served} (chunks of {self.chunk_size})",
            f"largest log-prob difference: {self.difference:.6g}",
            f"from one run without LMCache to the next: {self.own_difference:.6g}",
            *(
                f"{verb}: {_size(way.bytes)} in {way.seconds:.2f} s"
                + (f", {way.failed} transfers failed" if way.failed else "")
                for verb, way in (("stored", self.stored), ("loaded", self.loaded))
            ),
        ]

    @property
    def error(self) -> str | None:
        wrong = sum(g.wrong for g in self.groups)
        unknown = sum(g.unknown for g in self.groups)
        compared = sum(g.compared for g in self.groups)
        if wrong or unknown:
            never = f", {unknown} were never stored" if unknown else ""
            return f"{wrong} of {compared} pages hold other bytes than stored{never}"
        if self.loaded.failed:
            return f"{self.loaded.failed} loads failed; their prompts were computed"
        if not all(self.served) or not compared:
            return (
                f"LMCache served {', '.join(map(str, self.served))} tokens of "
                f"{self.prompts} prompts, and {compared} pages: nothing is shown"
            )
        return None


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


@dataclass(frozen=True)
class Geometry:
    """One KV cache that was allocated, stored and loaded without an engine."""

    name: str
    layout: str
    groups: list[Group]
    stray: int
    """Bytes that a load changed outside the pages that it was to write."""
    failure: str = ""
    """Why there is nothing to compare."""
    left_out: str = ""
    """Why it cannot be had on this device."""

    @property
    def full_name(self) -> str:
        return f"{self.name}, {self.layout}"

    @property
    def is_right(self) -> bool:
        pages = self.groups and all(g.compared and not g.wrong for g in self.groups)
        return bool(pages or self.left_out) and not self.stray and not self.failure


@dataclass(frozen=True)
class PagesChecked(Rows):
    """KV caches of many geometries."""

    header = (
        "KV cache",
        "layout",
        "kind",
        "layers",
        "block size",
        "k",
        "page bytes",
        "pages compared",
        "pages wrong",
    )
    device: str
    geometries: list[Geometry]

    def rows(self) -> list[tuple[str, ...]]:
        return [
            (
                *((g.name, g.layout) if i == 0 else ("", "")),
                group.kind,
                str(group.layers),
                str(group.block_size),
                str(group.blocks_per_kv_block),
                str(group.page_size_bytes),
                str(group.compared),
                str(group.wrong),
            )
            for g in self.geometries
            for i, group in enumerate(g.groups)
        ]

    def notes(self) -> list[str]:
        pages = sum(group.compared for g in self.geometries for group in g.groups)
        checked = [g for g in self.geometries if not g.left_out]
        lines = [f"{len(checked)} KV caches on {self.device}, {pages} pages"]
        for g in self.geometries:
            if g.stray:
                lines.append(f"{g.full_name}: {g.stray} bytes changed outside pages")
            if why := g.failure or g.left_out and f"left out, {g.left_out}":
                lines.append(f"{g.full_name}: {why}")
        return lines

    @property
    def error(self) -> str | None:
        wrong = [g.full_name for g in self.geometries if not g.is_right]
        if wrong:
            return f"wrong: {'; '.join(wrong)}"
        return None if any(g.groups for g in self.geometries) else "nothing is shown"
