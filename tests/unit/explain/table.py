"""README.md's table of real models: `python -m tests.unit.explain.table` writes it."""

import tempfile
from itertools import groupby
from pathlib import Path

from tests.unit.explain.configs import MODELS
from vllm_patches import releases

README = Path(__file__).parents[3] / "README.md"
MARKERS = ("<!-- models -->", "<!-- /models -->")
_HEADER = (
    *("model", "backend", "layers in groups", "block", "kernel block", "page bytes"),
    *("chunk", "bytes of 1,000 tokens", "tokens per GiB"),
)


def table() -> str:
    """The table as markdown."""
    rows = [_HEADER, ("---",) * len(_HEADER)]
    with tempfile.TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            told = model.explain(Path(folder, name))
            assert told.served, (name, told.refusal)
            rows.append(
                (
                    name,
                    model.attention_backend,
                    _layers(told.groups),
                    _each(f"{g.block_size:,}" for g in told.groups),
                    _each(
                        f"{g.kernel_block_size:,}"
                        + (f" (k = {g.k})" if g.k > 1 else "")
                        for g in told.groups
                        if g.kind != "MambaSpec"
                    ),
                    _each(_page(g) for g in told.groups),
                    f"{told.chunk_size:,}",
                    f"{told.bytes_per_1000_tokens:,}",
                    f"{told.tokens_per_gib:,}",
                )
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _layers(groups) -> str:
    """Layers of each group, by kind."""
    kinds = groupby(groups, key=lambda group: group.kind.removesuffix("Spec"))
    return ", ".join(
        f"{' + '.join(str(sum(group.layers)) for group in alike)} {kind}"
        for kind, alike in kinds
    )


def _page(group) -> str:
    padding = f" ({group.padding_bytes:,} padding)" if group.padding_bytes else ""
    return f"{group.page_size_bytes:,}{padding}"


def _each(values) -> str:
    return ", ".join(dict.fromkeys(values))


if __name__ == "__main__":
    README.write_text(releases.with_table(README.read_text(), MARKERS, table()))
