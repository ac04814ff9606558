"""What it means for an operator, as a result of the tool."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lmcache.integration.vllm.lmcache_mp_connector import (
    build_parallel_strategy_from_vllm_config,
    get_group_tokens_per_block,
)
from lmcache.integration.vllm.utils import vllm_layout_hints
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec
from vllm.v1.worker import logical_blocks_compat as compat
from vllm.v1.worker.logical_blocks import digest

from lmcache_hook import connector, namespace, server, stored
from vllm_patches.check import audit
from vllm_patches.explain.options import Options
from vllm_patches.explain.plan import Plan, Stage
from vllm_patches.results import Result

_GIB = 1 << 30


@dataclass(frozen=True)
class Part:
    """Bytes of a page that belong together."""

    name: str
    offset: int
    """From the start of the page, or of the part that it is in."""
    size: int


@dataclass(frozen=True)
class Group:
    """Layers of one KV cache group whose pages are alike."""

    id: int
    kind: str
    """The class of its spec in vLLM."""
    layers: list[int]
    """Layers in each pipeline stage."""
    block_size: int
    """Tokens per block id."""
    kernel_block_size: int
    """Tokens per kernel page."""
    k: int
    """Kernel pages per page."""
    page_size_bytes: int
    padding_bytes: int
    """Of those, what holds nothing."""
    view: list[int] | None
    """The shape of a block in the view; None where there is none."""
    view_bytes: int | None
    """What of a page the view shows, and LMCache moves."""
    window: int
    """Tokens that the layers look back at; 0 for all."""
    parts: list[Part]
    """What is in a page: kernel pages, or states and padding."""
    kernel_page: list[Part]
    """What is in a kernel page: heads or tokens, or planes of keys and values."""
    entry: list[Part]
    """What is in the smallest of those: one token's keys and values in one head."""


@dataclass(frozen=True)
class Explained(Result):
    """What vLLM does to the model's KV cache, and whether the connector serves it."""

    model: str
    vllm: str
    kv_cache_layout: str
    groups: list[Group]
    served: bool
    refusal: str | None
    """Why it is not."""
    fingerprint: str | None
    has_weights: bool
    """Whether weights were beside the config. The fingerprint samples them."""
    chunk_size: int | None
    """Tokens per LMCache chunk."""
    bytes_per_1000_tokens: int | None
    """What LMCache keeps of a prefix, all ranks together."""
    tokens_per_gib: int | None
    lmcache_server: str | None
    vllm_serve: str | None

    HEADER: ClassVar[tuple[str, ...]] = (
        *("group", "kind", "layers", "block", "kernel block", "k"),
        *("page bytes", "padding", "view of a block", "window"),
    )

    @property
    def failed(self) -> bool:
        return not self.served

    def rows(self) -> list[tuple[str, ...]]:
        """A row of text for every group."""
        return [
            (
                str(group.id),
                group.kind,
                "+".join(map(str, group.layers)),
                f"{group.block_size:,}",
                f"{group.kernel_block_size:,}",
                str(group.k),
                f"{group.page_size_bytes:,}",
                f"{group.padding_bytes:,}",
                "x".join(map(str, group.view)) if group.view else "-",
                f"{group.window:,}" if group.window else "-",
            )
            for group in self.groups
        ]

    def lines(self) -> list[str]:
        rows = [self.HEADER, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in rows
        ]
        head = f"{self.model} on vLLM {self.vllm}, layout {self.kv_cache_layout}"
        if self.refusal is not None:
            return [head, "", *table, "", f"refused: {self.refusal}"]
        unknown = "" if self.has_weights else " (an engine's has its weights, too)"
        return [
            head,
            "",
            *table,
            "",
            "served",
            f"fingerprint: {self.fingerprint}{unknown}",
            f"a prefix of 1,000 tokens: {self.bytes_per_1000_tokens:,} bytes",
            f"a GiB: {self.tokens_per_gib:,} tokens",
            "",
            str(self.lmcache_server),
            str(self.vllm_serve),
        ]


def explained(folder: Path, options: Options, plan: Plan) -> Explained:
    """What the plan means; a refusal of the overlay's or the hook's is part of it."""
    import vllm

    first = plan.stages[0]
    try:
        served = _serve(plan)
        refusal = None
    except (ValueError, NotImplementedError) as e:  # LMCache's own has the latter
        served, refusal = {}, str(e)
    chunk = served.get("chunk_size")
    return Explained(
        model=str(folder),
        vllm=vllm.__version__,
        kv_cache_layout=first.layout,
        groups=_groups(plan, has_views=refusal is None),
        served=refusal is None,
        refusal=refusal,
        fingerprint=served.get("fingerprint"),
        has_weights=any(any(folder.glob(f"*.{s}")) for s in namespace.WEIGHTS),
        chunk_size=chunk,
        bytes_per_1000_tokens=served.get("bytes_per_1000_tokens"),
        tokens_per_gib=served.get("tokens_per_gib"),
        lmcache_server=server.command(chunk) if chunk else None,
        vllm_serve=options.command(str(folder)) if chunk else None,
    )


def _serve(plan: Plan) -> dict[str, Any]:
    """What the connector would do with these pages.

    Raises:
        ValueError: if it, the overlay or LMCache would refuse them.

    """
    config, first = plan.vllm_config, plan.stages[0]
    connector.refuse(config)
    tokens = get_group_tokens_per_block(config, first.kv_cache_config)
    specs = [stored.leaf_spec(g) for g in first.kv_cache_config.kv_cache_groups]
    chunk = server.chunk_size(tokens, first.kv_cache_config.has_mamba_layers)
    kept = stored.kept(specs, tokens, chunk)
    hints = vllm_layout_hints(config)
    for stage in plan.stages:
        views = dict(stage.caches.items())
        infos = server.group_infos(config, stage.kv_cache_config, views, hints, kept)
        server.check_views(views, infos, hints, chunk)
    parallel = config.parallel_config
    before, parts, pieces = parallel.rank, [], {}
    for rank in range(parallel.world_size):
        parallel.rank = rank
        strategy = build_parallel_strategy_from_vllm_config(config, 1)
        stage = plan.stages[rank // parallel.tensor_parallel_size]
        parts.append((strategy.kv_worker_id, stage.caches.document))
        pieces[strategy.kv_worker_id] = _chunk_bytes(stage, kept)
    parallel.rank = before
    size = sum(pieces.values())
    return {
        "chunk_size": chunk,
        "fingerprint": digest(namespace.document(config, strategy, parts)),
        "bytes_per_1000_tokens": math.ceil(1000 * size / chunk),
        "tokens_per_gib": _GIB * chunk // size,
    }


def _chunk_bytes(stage: Stage, kept: list[stored.Kept]) -> int:
    """What LMCache stores of a chunk for one rank of the stage."""
    groups = stage.kv_cache_config.kv_cache_groups
    return sum(
        k.last * _view_bytes(stage, name)
        for k in kept
        for name in groups[k.group_id].layer_names
    )


def _view_bytes(stage: Stage, layer: str) -> int:
    """Bytes that the layer's view shows of a block."""
    view = stage.caches[layer]
    return view[0].numel() * view.element_size()


def _groups(plan: Plan, has_views: bool) -> list[Group]:
    """The groups, those of layers with different pages split."""
    alike: dict[tuple[int, Any], list[list[str]]] = {}
    for number, stage in enumerate(plan.stages):
        specs = audit.leaf_specs(stage.kv_cache_config)
        for group_id, group in enumerate(stage.kv_cache_config.kv_cache_groups):
            for name in group.layer_names:
                key = (group_id, specs[name])
                names = alike.setdefault(key, [[] for _ in plan.stages])
                names[number].append(name)
    groups = []
    for (group_id, spec), layers in alike.items():
        stage, name = next((s, n[0]) for s, n in zip(plan.stages, layers) if n)
        counts = [len(names) for names in layers]
        groups.append(_group(group_id, spec, counts, stage, name, has_views))
    return groups


def _group(
    group_id: int,
    spec: Any,
    layers: list[int],
    stage: Stage,
    name: str,
    has_views: bool,
) -> Group:
    sizes = stage.kernel_block_sizes
    kernel = sizes[group_id] if group_id < len(sizes) else spec.block_size
    if isinstance(spec, AttentionSpec):
        kernel = compat.layer_kernel_block_size(spec, kernel)
    blocks = stage.caches.blocks.get(name) if has_views else None
    if blocks is not None:
        kernel = blocks.kernel_block_size
    view = stage.caches[name] if blocks is not None else None
    k = spec.block_size // kernel
    page = spec.page_size_bytes
    parts, content = _parts(spec, k)
    kernel_page: list[Part] = []
    entry: list[Part] = []
    if isinstance(spec, AttentionSpec):
        bound = stage.caches.raw[name]
        kernel_page, entry = _inside(spec, bound, content // k, kernel)
    return Group(
        id=group_id,
        kind=type(spec).__name__,
        layers=layers,
        block_size=spec.block_size,
        kernel_block_size=kernel,
        k=k,
        page_size_bytes=page,
        padding_bytes=page - content,
        view=list(view.shape[1:]) if view is not None else None,
        view_bytes=_view_bytes(stage, name) if view is not None else None,
        window=compat.spec_facts(spec)["window"],
        parts=parts,
        kernel_page=kernel_page,
        entry=entry,
    )


def _parts(spec: Any, k: int) -> tuple[list[Part], int]:
    """What is in a page, and how many of its bytes hold something."""
    if isinstance(spec, MambaSpec):
        states = zip(spec.shapes, spec.dtypes)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in states]
        names = ["conv", "ssm"]
        if len(sizes) != len(names):
            names = [f"state {i}" for i in range(len(sizes))]
    else:
        content = spec.page_size_bytes
        if isinstance(spec, AttentionSpec):
            content = compat.unpadded_page_size_bytes(spec)
        sizes, names = [content // k] * k, [str(i) for i in range(k)]
    parts = _in_a_row(names, sizes)
    content = sum(sizes)
    if padding := spec.page_size_bytes - content:
        parts.append(Part("padding", content, padding))
    return parts, content


def _in_a_row(names: list[str], sizes: list[int]) -> list[Part]:
    return [
        Part(name, sum(sizes[:i]), size)
        for i, (name, size) in enumerate(zip(names, sizes))
    ]


def _inside(
    spec: Any, bound: Any, size: int, tokens: int
) -> tuple[list[Part], list[Part]]:
    """What is in a kernel page of so many bytes and tokens, and in its first part."""
    item = spec.dtype.itemsize
    slots = max(1, compat.num_states(spec) * tokens // spec.block_size)
    one = size // (spec.num_kv_heads * slots)
    keys = spec.head_size * item
    if bound.ndim == 5:
        # Up to vLLM 0.25: a plane of keys, a plane of values.
        return _in_a_row(["K", "V"], [size // 2] * 2), []
    values = getattr(spec, "head_size_v", None) or spec.head_size
    if keys + values * item > one:
        entry = _in_a_row(["latent"], [one])
    else:
        entry = _in_a_row(["K", "V"], [keys, values * item])
        if rest := one - keys - values * item:
            entry.append(Part("scales", one - rest, rest))
    heads, first = spec.num_kv_heads, bound.ndim == 4 and bound.stride()[1:3]
    is_head_major = heads > 1 and first and first[0] > first[1]
    name, count = ("head", heads) if is_head_major else ("token", slots)
    names = [f"{name} {i}" for i in range(count)]
    return _in_a_row(names, [size // count] * count), entry
