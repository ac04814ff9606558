"""Explain why two engines cannot read each other's KV cache pages.

`LMCacheLogicalConnector` logs the fingerprint and what it digests in one line; a file
of either is read here.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_patches.errors import PatchesError

# lmcache_hook/connector.py logs it.
_LINE = re.compile(r"KV cache fingerprint ([0-9a-f]{64}) (\{.*\})")
_MISSING = "none"
_SHOWN = 80
"""Characters of a value that are shown."""


@dataclass(frozen=True)
class Fingerprint:
    """One engine's fingerprint and what it digests."""

    digest: str
    contract: int
    model: dict[str, Any]
    """What of the model's resolved config decides the values in a page."""
    parallel: dict[str, Any]
    """How tokens and heads are split over ranks."""
    pages: list[dict[str, Any]]
    """Piece of a chunk -> the formats of its pages, and each layer's group and
    format."""


def read(path: Path) -> Fingerprint:
    """The last fingerprint in an engine's log, or in a file that holds such a line.

    Raises:
        PatchesError: if there is none.

    """
    try:
        text = path.read_text(errors="replace")
    except OSError as e:
        raise PatchesError(f"{path} cannot be read: {e.strerror}.") from None
    lines = _LINE.findall(text)
    if not lines:
        raise PatchesError(
            f"{path} has no line `KV cache fingerprint ...`: take the log of an engine "
            "that runs LMCacheLogicalConnector."
        )
    digest, line = lines[-1]
    try:
        document = json.loads(line)
        pages = [document["pages"][i] for i in document.get("ranks", ())]
        return Fingerprint(
            digest,
            document["contract"],
            document.get("model", {}),
            document.get("parallel", {}),
            pages,
        )
    except (json.JSONDecodeError, KeyError, IndexError, TypeError) as e:
        raise PatchesError(
            f"{path}: the fingerprint line is cut off or not this tool's ({e})."
        ) from None


def explain(here: Fingerprint, there: Fingerprint) -> list[str]:
    """One line per thing that differs; none if the engines can share pages.

    Raises:
        PatchesError: if the two follow different contract versions, whose fields
            cannot be held against each other.

    """
    if here.digest == there.digest:
        return []
    if here.contract != there.contract:
        raise PatchesError(
            f"contract version {here.contract} here, {there.contract} there: install "
            "one vllm-logical-blocks version for both engines."
        )
    lines = [f"model: {d}" for d in _differences(here.model, there.model)]
    if split := list(_differences(here.parallel, there.parallel)):
        lines.append(f"parallel: {'; '.join(split)}")
    lines += _page_lines(here.pages, there.pages)
    return lines or ["the digests differ, and nothing in the logs says why"]


def _page_lines(ours: list[Any], theirs: list[Any]) -> Iterator[str]:
    if len(ours) != len(theirs):
        yield f"ranks with pages of their own: {len(ours)} here, {len(theirs)} there"
        return
    said = ((rank, _rank(*both)) for rank, both in enumerate(zip(ours, theirs)))
    for line, ranks in groupby(said, key=lambda pair: pair[1]):
        if line:
            yield f"{_numbers('rank', [rank for rank, _ in ranks])}{line}"


def _rank(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """What differs in one rank's pages; empty if nothing does."""
    layers = [ours["layers"], theirs["layers"]]
    if len(layers[0]) != len(layers[1]):
        return f": {len(layers[0])} layers here, {len(layers[1])} there"
    pairs = [
        tuple(
            {"group": group} | side["formats"][i]
            for side, (group, i) in zip((ours, theirs), both)
        )
        for both in zip(*layers)
    ]
    differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    if not differing:
        return ""
    first = pairs[differing[0]]
    of = f" of {len(pairs)}" if len(pairs) > 1 else ""
    kind = first[0].get("kind") or first[1].get("kind")
    return f", {_numbers('layer', differing)}{of} ({kind}): " + "; ".join(
        _differences(*first)
    )


def _numbers(word: str, numbers: Iterable[int]) -> str:
    numbers = list(numbers)
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append("-".join(map(str, sorted({members[0], members[-1]}))))
    return f"{word}{'s' if len(numbers) > 1 else ''} {', '.join(runs)}"


def _differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """What differs, field by field, in nested dicts of JSON values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for field in {**ours, **theirs}:
            inner = f"{path}.{field}" if path else field.replace("_", " ")
            yield from _differences(ours.get(field), theirs.get(field), inner)
    elif ours != theirs:
        yield f"{path} {_show(ours)} here, {_show(theirs)} there"


def _show(value: Any) -> str:
    if value in (None, "", []):
        return _MISSING
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
