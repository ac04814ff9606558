"""Pages of many geometries, without an engine: ``python -m vllm_patches.check.pages``.

vLLM's own code plans and allocates each KV cache on the device; the connector registers
it with a private LMCache server. Random bytes are stored and loaded into other blocks,
and the whole allocation is held against what it must hold then, byte for byte.

Takes torch, LMCache and vLLM's Python files; nothing that vLLM compiles.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig
from vllm.plugins import load_general_plugins
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker import utils as worker_utils

import lmcache_hook
from lmcache_hook import server
from vllm_patches.check import audit, processes, roles, verdict

CHUNKS = 3
"""Chunks that are stored and loaded."""
FOUND = "pages.json"

_BF16, _FP32, _UINT8 = torch.bfloat16, torch.float32, torch.uint8
_SPARE_BLOCKS = 2


class Layers(NamedTuple):
    """The layers of one KV cache group."""

    specs: list[Any]
    """One a layer."""
    kernel_block_size: int
    """Tokens per kernel page."""


class Geometry(NamedTuple):
    name: str
    layout: str
    """vLLM's ``KVCacheLayout``."""
    groups: list[Layers]

    @property
    def chunk_size(self) -> int:
        specs = [spec for group in self.groups for spec in group.specs]
        has_states = any(isinstance(spec, MambaSpec) for spec in specs)
        return server.chunk_size((s.block_size for s in specs), has_states)


def attention(
    block_size: int,
    k: int = 1,
    kind: str = "FullAttentionSpec",
    layers: int = 2,
    **fields: Any,
) -> Layers:
    """Attention layers, k kernel pages a page; small heads unless told otherwise."""
    values = {"num_kv_heads": 2, "head_size": 64, "dtype": _BF16} | fields
    spec = getattr(interface, kind)(block_size=block_size, **values)
    return Layers([spec] * layers, block_size // k)


def latent(block_size: int, k: int = 1, width: int = 576, **fields: Any) -> Layers:
    """Latent attention (MLA)."""
    values: dict[str, Any] = {"num_kv_heads": 1, "head_size": width}
    values["kind"] = "MLAAttentionSpec"
    return attention(block_size, k, **values | fields)


def states(page: Layers, *shapes: tuple[int, ...], layers: int = 3) -> Layers:
    """Mamba layers, conv and recurrent state, padded to the page of another group."""
    spec = page.specs[0]
    mamba = MambaSpec(
        block_size=spec.block_size,
        shapes=shapes,
        dtypes=(_BF16, _FP32)[: len(shapes)],
        page_size_padded=spec.page_size_bytes,
        mamba_cache_mode="align",
    )
    return Layers([mamba] * layers, spec.block_size)


def geometries() -> list[Geometry]:
    """By chunk size, so that one server serves neighbors."""
    plain, sub = attention(256), attention(256, k=8)
    window: dict[str, Any] = dict(kind="SlidingWindowSpec", sliding_window=128)
    qwen = attention(544, k=17, head_size=256)
    qwen_states = states(qwen, (3, 6144), (16, 128, 128))
    large = attention(1600, k=25, layers=1, num_kv_heads=4, head_size=256, dtype=_UINT8)
    small_states = states(plain, (3, 512), (4, 64, 64))
    sparse = latent(256).specs + latent(256, width=132, dtype=_UINT8).specs
    local: dict[str, Any] = dict(
        kind="ChunkedLocalAttentionSpec", attention_chunk_size=256
    )
    return [
        Geometry("plain", "LBHNC", [plain]),
        Geometry("plain", "LBNHC", [plain]),
        Geometry("plain, blocks first", "BLHNC", [plain]),
        Geometry("plain, blocks first", "BLNHC", [plain]),
        Geometry("plain, small blocks", "LBHNC", [attention(16)]),
        Geometry("sub-paged", "LBHNC", [sub]),
        Geometry("sub-paged", "LBNHC", [sub]),
        Geometry("sub-paged, 8 bits", "LBHNC", [attention(256, k=4, dtype=_UINT8)]),
        Geometry(
            "padded pages", "LBHNC", [attention(64, page_size_padded=2 * 64 * 512)]
        ),
        Geometry("latent attention", "LBHNC", [latent(64)]),
        Geometry("latent attention, sub-paged", "LBNHC", [latent(256, k=4)]),
        Geometry("latent attention and indexer", "BLNHC", [Layers(sparse, 256)]),
        Geometry(
            "window of a block", "LBHNC", [attention(128), attention(128, **window)]
        ),
        Geometry(
            "window below a block, sub-paged",
            "LBHNC",
            [sub, attention(256, k=8, **window)],
        ),
        Geometry(
            "window of two chunks",
            "LBHNC",
            [
                attention(32),
                attention(32, kind="SlidingWindowSpec", sliding_window=512),
            ],
        ),
        Geometry("local chunks", "LBHNC", [attention(128), attention(128, **local)]),
        Geometry("hybrid", "LBHNC", [small_states, plain]),
        Geometry("hybrid, sub-paged", "LBHNC", [small_states, sub]),
        Geometry("hybrid, blocks first", "BLHNC", [small_states, plain]),
        Geometry("hybrid of 544", "LBHNC", [qwen_states, qwen]),
        Geometry("hybrid of 544", "LBNHC", [qwen_states, qwen]),
        Geometry(
            "hybrid of 1600, 8 bits",
            "LBHNC",
            [states(large, (3, 10240), (48, 128, 128), layers=1), large],
        ),
    ]


def plan(geometry: Geometry, port: int, device: str) -> tuple[Any, Any]:
    """The configs of an engine and of its KV cache.

    The model has no layers and no weights: its KV cache is given.
    """
    try:  # vLLM 0.33 on
        from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

    groups = []
    for i, layers in enumerate(geometry.groups):
        names = [f"layers.{i}.{j}" for j in range(len(layers.specs))]
        spec = layers.specs[0]
        if any(other != spec for other in layers.specs):
            leaves = dict(zip(names, layers.specs))
            spec = UniformTypeKVCacheSpecs(spec.block_size, kv_cache_specs=leaves)
        groups.append(KVCacheGroupSpec(names, spec))
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    config = VllmConfig(
        device_config=DeviceConfig(device=torch.device(device)),
        kv_transfer_config=KVTransferConfig(
            kv_connector=lmcache_hook.NAME,
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
    )
    setattr(config, "model_config", _Model)  # noqa: B010
    blocks = [geometry.chunk_size // g.specs[0].block_size for g in geometry.groups]
    config.cache_config.kv_cache_layout = geometry.layout
    config.cache_config.num_gpu_blocks_override = (
        1 + 2 * CHUNKS * sum(blocks) + _SPARE_BLOCKS
    )
    return config, get_kv_cache_config_from_groups(config, groups, 1 << 40)


class _Model:
    """What the connector asks of a model."""

    model = "vllm-patches-check-pages"
    hf_config = SimpleNamespace(to_dict=dict)
    dtype, quantization, revision = "bfloat16", None, None
    use_mla = False


def check(geometry: Geometry, port: int, device: str) -> verdict.Geometry:
    """Store, load into other blocks, and compare."""
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.logical_blocks import LogicalKVCaches

    config, kv_config = plan(geometry, port, device)
    sizes = [group.kernel_block_size for group in geometry.groups]
    both = roles.Roles.make(config, kv_config)
    try:
        with both.worker.get_mem_pool_context() or nullcontext():
            tensors = worker_utils.allocate_kv_cache(
                kv_config, torch.device(device), KVCacheLayout[geometry.layout], sizes
            )
        caches = LogicalKVCaches(kv_config, tensors, sizes, geometry.layout)
        # lmcache/v1/platform/devices/cpu/shm.py
        contiguous = caches.with_padding().values()
        if device == "cpu" and not all(view.is_contiguous() for view in contiguous):
            why = "LMCache takes contiguous tensors only on a CPU"
            return verdict.Geometry(*geometry[:2], [], 0, left_out=why)
        both.register(caches)
        return _round_trip(geometry, both, kv_config, caches)
    finally:
        both.shutdown()


def _round_trip(
    geometry: Geometry, both: roles.Roles, kv_config: Any, caches: Any
) -> verdict.Geometry:
    rng = random.Random(geometry.name)
    tokens = [rng.getrandbits(16) for _ in range(CHUNKS * geometry.chunk_size + 17)]
    storage = next(iter(caches.blocks.values())).bound.untyped_storage()
    memory = torch.empty(0, dtype=_UINT8, device=storage.device).set_(storage)
    memory.random_(256)
    written = memory.clone()
    ids = rng.sample(range(1, kv_config.num_blocks), kv_config.num_blocks - 1)
    counts = [
        CHUNKS * geometry.chunk_size // g.specs[0].block_size for g in geometry.groups
    ]
    source, target = ([[ids.pop() for _ in range(n)] for n in counts] for _ in "st")
    both.store(roles.request(tokens), source)
    # LMCache answers a store shortly before lookups find it.
    whole = CHUNKS * geometry.chunk_size
    roles.wait(lambda: both.load(roles.request(tokens), target) == whole or None)
    if storage.device.type != "cpu":
        torch.accelerator.synchronize(storage.device)

    expected = written.clone()
    connector = both.worker
    pages = audit.kept_blocks(
        target, connector._kept, connector._tokens_per_block, skip=0
    )
    specs = audit.leaf_specs(kv_config)
    compared, wrong = [0] * len(counts), [0] * len(counts)
    for group, i, block_id in pages:
        for name in kv_config.kv_cache_groups[group].layer_names:
            blocks, content = caches.blocks[name], audit.content_bytes(specs[name])
            before, now, due = (
                _page(blocks, bytes_, n)
                for bytes_, n in (
                    (written, source[group][i]),
                    (memory, block_id),
                    (expected, block_id),
                )
            )
            compared[group] += 1
            wrong[group] += not torch.equal(now[:content], before[:content])
            due.copy_(now)
    groups = [
        verdict.Group(
            about["group"],
            about["kind"],
            about["layers"],
            about["block_size"],
            about["block_size"] // about["kernel_block_size"],
            about["page_size_bytes"],
            compared[about["group"]],
            wrong[about["group"]],
            0,
        )
        for about in audit.describe(kv_config, caches)
    ]
    stray = int((expected != memory).sum())
    return verdict.Geometry(*geometry[:2], groups, stray)


def _page(blocks: Any, memory: torch.Tensor, block_id: int) -> torch.Tensor:
    start = blocks.page_offset_bytes + block_id * blocks.block_stride_bytes
    return memory[start : start + blocks.page_size_bytes]


def run(folder: Path, chosen: Sequence[Geometry], device: str) -> Iterator[Any]:
    """Check each; one that fails says why."""
    for chunk_size, some in groupby(chosen, lambda g: g.chunk_size):
        log = folder / f"server-{chunk_size}.log"
        lmcache = processes.Server(log, processes.private_env())
        try:
            lmcache.start(chunk_size=chunk_size, l1_size_gb=1)
            for geometry in some:
                print(f"{geometry.name}, {geometry.layout}", flush=True)
                try:
                    yield check(geometry, lmcache.port, device)
                except (RuntimeError, ValueError, OSError) as e:
                    why = f"{type(e).__name__}: {e}"
                    yield verdict.Geometry(*geometry[:2], [], 0, why)
        finally:
            lmcache.stop()


def main(file: str) -> None:
    folder = Path(json.loads(Path(file).read_text())["folder"])
    load_general_plugins()  # As every engine does; one is the connector's.
    lmcache_hook.register()
    if not hasattr(worker_utils, "allocate_kv_cache"):
        raise RuntimeError("check --pages needs vLLM 0.29 or later")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = [asdict(each) for each in run(folder, geometries(), device)]
    document = {"device": device, "geometries": found}
    (folder / FOUND).write_text(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])
