"""Explain why two engines cannot read each other's KV cache pages.

`LMCacheLogicalConnector` logs the fingerprint and what it digests in one line; a file
of either is read here.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_patches.errors import PatchesError

# lmcache_hook/connector.py logs it.
_LINE = re.compile(r"KV cache fingerprint ([0-9a-f]{64}) (\{.*\})")
_MISSING = "none"


@dataclass(frozen=True)
class Fingerprint:
    """One engine's fingerprint and what it digests."""

    digest: str
    contract: int
    groups: list[list[dict[str, Any]]]
    """Per KV cache group, the distinct page formats of its layers."""


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
    digest, document = lines[-1]
    try:
        parsed = json.loads(document)
        return Fingerprint(digest, parsed["contract"], parsed["groups"])
    except (json.JSONDecodeError, KeyError) as e:
        raise PatchesError(
            f"{path}: the fingerprint line is cut off or not this tool's ({e})."
        ) from None


def explain(here: Fingerprint, there: Fingerprint) -> list[str]:
    """One line per field that differs; none if the engines can share pages.

    Raises:
        PatchesError: if the two follow different contract versions, whose fields
            cannot be held against each other.

    """
    if here.contract != there.contract:
        raise PatchesError(
            f"contract version {here.contract} here, {there.contract} there: install "
            "one vllm-logical-blocks version for both engines."
        )
    if here.digest == there.digest:
        return []
    lines = []
    for group_id in range(max(len(here.groups), len(there.groups))):
        ours, theirs = (
            side.groups[group_id] if group_id < len(side.groups) else []
            for side in (here, there)
        )
        for i in range(max(len(ours), len(theirs))):
            a, b = (side[i] if i < len(side) else {} for side in (ours, theirs))
            kind = a.get("kind") or b.get("kind")
            lines += [
                f"group {group_id}, {kind}: {field.replace('_', ' ')} "
                f"{_show(a.get(field))} here, {_show(b.get(field))} there"
                for field in {**a, **b}
                if a.get(field) != b.get(field)
            ]
    return lines


def _show(value: Any) -> str:
    if value in (None, "", []):
        return _MISSING
    return value if isinstance(value, str) else json.dumps(value)
