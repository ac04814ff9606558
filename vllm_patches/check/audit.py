"""Connectors that note what every page holds: when stored, and once loaded.

Loaded by a checked engine's workers and scheduler (``kv_connector_module_path``). The
bytes are read as the KV cache config places them (``LogicalBlocks.pages``), never
through the views that are registered with LMCache. A page is known by its piece of the
chunk, group, layer and the tokens up to its end, which are the same in every engine
that answers the same prompt.
"""

import hashlib
import json
import math
import os
import socket
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lmcache.integration.vllm.lmcache_mp_connector import (
    LMCacheMPConnector,
    get_group_tokens_per_block,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs

from lmcache_hook import server, stored
from lmcache_hook.connector import LMCacheLogicalConnector
from vllm_patches.check.engine import FOLDER, NOTES, WANTED

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.logical_blocks import LogicalKVCaches

_SERVER_TIMEOUT = 300.0


def leaf_specs(kv_cache_config: "KVCacheConfig") -> dict[str, Any]:
    """Layer name -> its own spec."""
    specs = {}
    for group in kv_cache_config.kv_cache_groups:
        spec: Any = group.kv_cache_spec
        for name in group.layer_names:
            specs[name] = spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                # A layer that shares another one's cache has no spec of its own.
                specs[name] = spec.kv_cache_specs.get(name, stored.leaf_spec(group))
    return specs


def content_bytes(spec: Any) -> int:
    """Bytes of a page without the padding at its end."""
    from vllm.v1.worker import logical_blocks_compat as compat

    if isinstance(spec, MambaSpec):
        states = zip(spec.shapes, spec.dtypes)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in states)
    return compat.unpadded_page_size_bytes(spec)


def describe(
    kv_cache_config: "KVCacheConfig", caches: "LogicalKVCaches"
) -> list[dict[str, Any]]:
    """What is registered, per KV cache group with pages: its first layer's."""
    groups = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        name = group.layer_names[0]
        if (blocks := caches.blocks.get(name)) is None:
            continue
        groups.append(
            {
                "group": group_id,
                "kind": type(stored.leaf_spec(group)).__name__,
                "layers": len(group.layer_names),
                "block_size": blocks.block_size,
                "kernel_block_size": blocks.kernel_block_size,
                "page_size_bytes": blocks.page_size_bytes,
                "view": list(caches[name].shape),
            }
        )
    return groups


def kept_blocks(
    block_ids: Sequence[Sequence[int]],
    kept: Sequence[stored.Kept],
    tokens_per_block: Sequence[int],
    skip: int | None = None,
) -> Iterator[tuple[int, int, int]]:
    """The real blocks of whole chunks that LMCache is to keep, or to load.

    Args:
        block_ids: Engine group id -> its block ids, whole chunks.
        kept: What LMCache keeps of each group's chunks.
        tokens_per_block: Engine group id -> tokens per block id.
        skip: Of a load, the tokens at its start that are not to be written; None for a
            store. Of a window's chunks only the last ones are loaded.

    Yields:
        Group id, index of the block, block id.

    """
    for k in kept:
        ids = block_ids[k.group_id]
        chunks = len(ids) // k.per_chunk
        _, window = k.bucket
        first = max(0, chunks - window) if skip is not None and window > 0 else 0
        for i in range(first * k.per_chunk, len(ids)):
            is_kept = i % k.per_chunk >= k.per_chunk - k.last
            is_skipped = i * tokens_per_block[k.group_id] < (skip or 0)
            if is_kept and not is_skipped and ids[i] != stored.NULL_BLOCK:
                yield k.group_id, i, ids[i]


class _Transfer(NamedTuple):
    what: str
    """"stored" or "loaded"."""
    op: Any
    future: Any
    submitted: float
    bytes: int
    """Bytes of its pages; 0 for a load that has not come yet."""


class Notes:
    """What one worker's pages hold, a JSON line each."""

    def __init__(self, connector: Any, caches: "LogicalKVCaches") -> None:
        config, kv_config = connector._vllm_config, connector._kv_cache_config
        adapter = connector.worker_adapter
        self._adapter, self._caches = adapter, caches
        self._tokens_per_block = get_group_tokens_per_block(config, kv_config)
        specs = [stored.leaf_spec(group) for group in kv_config.kv_cache_groups]
        chunk = adapter.lmcache_tokens_per_chunk
        self._kept = stored.kept(specs, self._tokens_per_block, chunk)
        leaves = leaf_specs(kv_config)
        self._layers = [
            {
                n: content_bytes(leaves[n])
                for n in group.layer_names
                if n in caches.blocks
            }
            for group in kv_config.kv_cache_groups
        ]
        self._piece = adapter.parallel_strategy.kv_worker_id
        self._rank = adapter.parallel_strategy.vllm_worker_id
        self._transfers: list[_Transfer] = []
        folder = Path(config.kv_transfer_config.get_from_extra_config(FOLDER, ""))
        name = NOTES.replace("*", str(self._rank))
        self._file = (folder / name).open("w", buffering=1)
        for group in describe(kv_config, caches):
            self._note("group", **group)

    def storing(self, metadata: Any) -> None:
        """Note the pages of the stores that were just submitted."""
        for op, future in self._submitted("STORE", metadata, "store_futures"):
            moved = self._read("stored", op, None)
            self._transfers.append(
                _Transfer("stored", op, future, time.monotonic(), moved)
            )
            self._note("submitted", what="stored")

    def loading(self, metadata: Any) -> None:
        """Remember the loads that were just submitted."""
        for op, future in self._submitted("RETRIEVE", metadata, "retrieve_futures"):
            self._transfers.append(_Transfer("loaded", op, future, time.monotonic(), 0))
            self._note("submitted", what="loaded")

    def finished(self) -> None:
        """Note the pages of the loads that have come, and what stores took."""
        done = [t for t in self._transfers if t.future.query()]
        now = time.monotonic()
        for transfer in done:
            self._transfers.remove(transfer)
            succeeded = bool(transfer.future.result(timeout=0))
            moved = transfer.bytes
            if succeeded and transfer.what == "loaded":
                skip = transfer.op.skip_first_n_tokens
                moved = self._read("loaded", transfer.op, skip)
            self._note(
                "moved",
                what=transfer.what,
                succeeded=succeeded,
                bytes=moved,
                seconds=now - transfer.submitted,
            )

    def _submitted(
        self, direction: str, metadata: Any, futures: str
    ) -> Iterator[tuple[Any, Any]]:
        pending = getattr(self._adapter, futures)
        for request in metadata.requests:
            entry = pending.get(request.request_id)
            if request.direction == direction and entry is not None:
                yield request.op, entry[0] if isinstance(entry, tuple) else entry

    def _read(self, what: str, op: Any, skip: int | None) -> int:
        """Note every page of the operation; returns their bytes."""
        _synchronize(self._caches)
        prefixes: dict[int, str] = {}
        total = 0
        tokens = self._tokens_per_block
        for group, i, block_id in kept_blocks(op.block_ids, self._kept, tokens, skip):
            end = op.start + (i + 1) * tokens[group]
            if end not in prefixes:
                ids = array("q", op.token_ids[:end]).tobytes()
                prefixes[end] = hashlib.sha256(ids).hexdigest()[:32]
            for layer, content in self._layers[group].items():
                page = self._caches.blocks[layer].pages[block_id, :content]
                total += content
                self._note(
                    "page",
                    what=what,
                    piece=self._piece,
                    group=group,
                    layer=layer,
                    end=end,
                    prefix=prefixes[end],
                    digest=hashlib.sha256(page.cpu().numpy().data).hexdigest()[:32],
                )
        return total

    def _note(self, note: str, /, **values: Any) -> None:
        line = {"note": note, "rank": self._rank, **values}
        print(json.dumps(line), file=self._file)


def _synchronize(caches: "LogicalKVCaches") -> None:
    """Wait for all that was started on the KV cache's device."""
    device = next(iter(caches.blocks.values())).bound.device
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def ask_for_server(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Tell the command which server suits this engine, and wait until it listens.

    Raises:
        TimeoutError: if it does not in time.

    """
    transfer: Any = vllm_config.kv_transfer_config
    tokens_per_block = get_group_tokens_per_block(vllm_config, kv_cache_config)
    chunk = server.chunk_size(tokens_per_block, kv_cache_config.has_mamba_layers)
    specs = leaf_specs(kv_cache_config)
    per_chunk = 0
    for group, block in zip(kv_cache_config.kv_cache_groups, tokens_per_block):
        pages = sum(specs[name].page_size_bytes for name in group.layer_names)
        per_chunk += pages * (chunk // block if block else 0)
    wanted = {
        "chunk_size": chunk,
        "least_block": min(b for b in tokens_per_block if b),
        "chunk_bytes": per_chunk * vllm_config.parallel_config.world_size,
    }
    file = Path(transfer.get_from_extra_config(FOLDER, "")).parent / WANTED
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(wanted))
    fresh.replace(file)
    address = ("127.0.0.1", transfer.get_from_extra_config("lmcache.mp.port", None))
    deadline = time.monotonic() + _SERVER_TIMEOUT
    while True:
        try:
            socket.create_connection(address, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError("the command's LMCache server is missing") from None
            time.sleep(0.2)


class _Audited:
    """Mixed in before a connector for LMCache's servers."""

    notes: Notes

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        """Raises:
        RuntimeError: if this vLLM does not say where its pages are.

        """
        if not hasattr(KVConnectorBase_V1, "register_logical_kv_caches"):
            raise RuntimeError(
                "Only a patched vLLM says where its pages are: run `vllm-patches "
                "apply` in this environment. Other connectors run there as before."
            )
        ask_for_server(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]

    def register_logical_kv_caches(self, kv_caches: "LogicalKVCaches") -> None:
        super().register_logical_kv_caches(kv_caches)  # type: ignore[misc]
        self.notes = Notes(self, getattr(self, "logical_kv_caches", kv_caches))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)  # type: ignore[misc]
        self.notes.loading(self._get_connector_metadata())  # type: ignore[attr-defined]

    def wait_for_save(self) -> None:
        super().wait_for_save()  # type: ignore[misc]
        self.notes.storing(self._get_connector_metadata())  # type: ignore[attr-defined]

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        # Before vLLM is told: until then nothing else writes to these pages.
        self.notes.finished()
        return super().get_finished(finished_req_ids)  # type: ignore[misc]


class AuditedLogicalConnector(_Audited, LMCacheLogicalConnector):
    """This project's connector."""


class AuditedStockConnector(_Audited, LMCacheMPConnector):
    """LMCache's own."""
