"""The vLLM releases that a patch series exists for."""

from dataclasses import dataclass
from pathlib import Path

SERIES = Path(__file__).parent / "series"


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
    or "pooled" (one allocation for all layers)."""
    engine: bool
    """Whether an engine of this release is run in the tests, on the CPU."""

    @property
    def series(self) -> Path:
        """The folder of the release's patches."""
        return SERIES / f"v{self.version}"


RELEASES = (
    Release("0.32.0", torch="2.13.0", lmcache=("0.5.6",), era="pooled", engine=True),
)
