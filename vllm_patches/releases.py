"""The vLLM releases that a patch series exists for."""

from dataclasses import dataclass
from pathlib import Path

SERIES = Path(__file__).parent / "series"
MATRIX = ("<!-- support matrix -->", "<!-- /support matrix -->")
"""The lines in README.md that the support matrix stands between."""


@dataclass(frozen=True)
class Release:
    """One supported vLLM release and what its series was tested with."""

    version: str
    """vLLM's version, without a local version tag."""
    torch: str
    """The torch version that vLLM pins."""
    lmcache: tuple[str, ...]
    """LMCache versions the series was tested with."""
    era: str
    """How the release binds the KV cache: "planes" (K and V as a dim of size 2, Mamba
    states one by one), "packed" (K and V packed per head, one tensor per Mamba layer)
    or "pooled" (one allocation for all layers, kernel blocks mapped by the attention
    group)."""
    engine: bool
    """Whether an engine of this release is run in the tests, on the CPU."""

    @property
    def series(self) -> Path:
        """The folder of the release's patches."""
        return SERIES / f"v{self.version}"


_LMCACHE = ("0.5.6",)

RELEASES = (
    Release("0.24.0", "2.11.0", _LMCACHE, era="planes", engine=False),
    Release("0.25.1", "2.11.0", _LMCACHE, era="planes", engine=True),
    Release("0.26.0", "2.11.0", _LMCACHE, era="packed", engine=False),
    Release("0.28.0", "2.13.0", _LMCACHE, era="packed", engine=True),
    Release("0.30.0", "2.13.0", _LMCACHE, era="packed", engine=True),
    Release("0.32.0", "2.13.0", _LMCACHE, era="pooled", engine=True),
    Release("0.33.0", "2.14.0", _LMCACHE, era="pooled", engine=False),
)


def matrix() -> str:
    """The support matrix as a markdown table."""
    rows = [
        ("vLLM", "KV cache", "torch", "LMCache", "tested here"),
        ("---",) * 5,
        *(
            (
                release.version,
                release.era,
                release.torch,
                ", ".join(release.lmcache),
                "engine and tree" if release.engine else "tree",
            )
            for release in RELEASES
        ),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_matrix(readme: str) -> str:
    """README.md's text with the support matrix between its markers.

    Raises:
        ValueError: if a marker is missing.

    """
    start, end = (readme.index(marker) for marker in MATRIX)
    return f"{readme[: start + len(MATRIX[0])]}\n{matrix()}\n{readme[end:]}"
