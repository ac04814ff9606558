"""How long the views of a large hybrid pool take to build, and what they allocate.

Beside LMCache's own edits on the same input: one allocation that a sub-paged attention
group and Mamba groups overlay. The pool is a sparse file; no page of it is touched.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Annotated, Any

import typer

from scripts.engines import environment
from vllm_patches.installation import Installation

GROUP_LAYERS = 24
PAGE = 16384
"""Bytes: 256 tokens of one head, K and V of 16 bf16 elements each."""
BLOCK_SIZE, KERNEL_BLOCK_SIZE = 256, 32


def make_pool(layers: int, num_blocks: int, path: str) -> tuple[Any, dict[str, Any]]:
    """A KV cache config and its tensors: one attention group, the rest Mamba."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        MambaSpec,
    )

    attention = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.bfloat16
    )
    mamba = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((3, 512), (2, 32, 48)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=PAGE,
        mamba_cache_mode="align",
    )
    region = PAGE * num_blocks
    size = min(layers, GROUP_LAYERS) * region
    pool = torch.from_file(path, shared=True, size=size, dtype=torch.int8)
    is_placed = "layers" in {field.name for field in fields(KVCacheTensor)}
    pages = num_blocks * BLOCK_SIZE // KERNEL_BLOCK_SIZE
    groups, tensors, kv_caches = [], [], {}
    for first in range(0, layers, GROUP_LAYERS):
        names = [f"layers.{i}" for i in range(first, min(layers, first + GROUP_LAYERS))]
        spec = mamba if first else attention
        groups.append(KVCacheGroupSpec(names, spec))
        placement: dict[str, Any] = {"shared_by": names}
        if is_placed:
            placement = {
                "layers": names,
                "layer_stride": region,
                "block_stride": PAGE,
            }
        tensors.append(KVCacheTensor(size=size, **placement))
        for i, name in enumerate(names):
            layer = pool[i * region : (i + 1) * region]
            if first:
                kv_caches[name] = layer.view(num_blocks, 1, 1, PAGE)
            else:
                layer = layer.view(torch.bfloat16)
                kv_caches[name] = layer.view(pages, 1, KERNEL_BLOCK_SIZE, -1)
    return KVCacheConfig(num_blocks, tensors, groups), kv_caches


def milliseconds(build: Callable[[], Any], rounds: int) -> float:
    """The median time of one call, the first one left out."""
    build()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        build()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def new_storage_bytes(views: Iterable[Any], kv_caches: Iterable[Any]) -> int:
    """Bytes of the storages that the views have beyond those of the caches."""
    storages = {v.untyped_storage().data_ptr(): v.untyped_storage() for v in views}
    for kv_cache in kv_caches:
        storages.pop(kv_cache.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def main(
    layers: Annotated[int, typer.Option(help="Layers of the pool.")] = 96,
    blocks: Annotated[int, typer.Option(help="Blocks of the pool.")] = 100_000,
    rounds: Annotated[int, typer.Option(help="Rounds to take the median of.")] = 50,
) -> None:
    """Time the views of a large pool, beside LMCache's own edits."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from lmcache.integration.vllm.kv_cache_group_edits import apply_kv_cache_group_edits
    from vllm.v1.worker.logical_blocks import build_logical_kv_caches

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "pool")
        config, kv_caches = make_pool(layers, blocks, path)
        sizes = [
            BLOCK_SIZE if i else KERNEL_BLOCK_SIZE
            for i in range(len(config.kv_cache_groups))
        ]

        def ours() -> Any:
            return build_logical_kv_caches(config, kv_caches, sizes, "HND")

        def edits() -> Any:
            return apply_kv_cache_group_edits(config, kv_caches, {"kv_layout": "HND"})

        untouched = os.stat(path).st_blocks
        views = ours()
        allocated = new_storage_bytes(views.values(), kv_caches.values())
        ours_ms = milliseconds(ours, rounds)
        fingerprint_ms = milliseconds(lambda: ours().fingerprint, rounds)
        edits_ms = milliseconds(edits, rounds)
        touched = 512 * (os.stat(path).st_blocks - untouched)
    release = Installation.find().version
    typer.echo(
        f"vLLM {release}: {len(views)} layers of {blocks:,} blocks, "
        f"{PAGE:,} bytes a page\n"
        f"views:            {ours_ms:7.2f} ms (target: under 20)\n"
        f"  + fingerprint:  {fingerprint_ms:7.2f} ms\n"
        f"LMCache's edits:  {edits_ms:7.2f} ms\n"
        f"ratio:            {ours_ms / edits_ms:7.2f}\n"
        f"tensor memory allocated: {allocated} bytes; touched: {touched} bytes"
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(epilog=environment.RELEASE_HELP)(main)
    app(prog_name="scripts/bench")
