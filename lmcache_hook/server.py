"""Which server: one that takes the views, and keeps what must be apart apart.

LMCache 0.5.6 leaves an engine waiting for minutes where its server refuses, and says
over the message port neither how it is run nor that it was started anew. So all of its
conditions are checked here first, by its own code; and each engine stores two chunks
under tokens of its namespace's own, one of them null for some groups, and looks them
up: one chunk tells a server that keeps object groups apart, two one that does not.
"""

import math
import random
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from lmcache.integration.vllm.kv_cache_groups import create_engine_group_infos_from_vllm
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.utils import normalize_and_discover_per_layer_formats
from lmcache.v1.kv_layer_groups import KVLayerGroupsManager
from lmcache.v1.multiprocess.group_view import (
    EngineGroupInfo,
    engine_group_layer_indices,
    expand_engine_block_ids,
)

from lmcache_hook import stored

_REAL_BLOCK = 1
_LEAST_CHUNK = 256  # LMCache's default
TIMEOUT = 60.0
"""Seconds to wait for an answer of the server's."""
_SAMPLE_TIMEOUT = 20.0
"""Seconds for all workers to store their sample."""
_PAUSE = 0.5
_PATIENCE = 2.0
"""Seconds that a registration may take before the server is asked something else."""


def chunk_size(blocks: Iterable[int], has_states: bool) -> int:
    """Tokens per chunk that suit blocks of these sizes, in tokens.

    States are reusable at a chunk's end only, so their chunks are one block.
    """
    block = math.lcm(*(b for b in blocks if b))
    return block if has_states else -(-_LEAST_CHUNK // block) * block


def command(chunk: int) -> str:
    """The server to start for an engine, chunk in tokens."""
    return (
        f"lmcache server --chunk-size {chunk} --separate-object-groups "
        "--l1-size-gb 100 --eviction-policy LRU"
    )


def group_infos(
    vllm_config: Any,
    kv_cache_config: Any,
    views: Mapping[str, Any],
    hints: Any,
    kept: Sequence[stored.Kept],
) -> list[EngineGroupInfo]:
    """What LMCache's server is told of the groups, windows in whole blocks."""
    dcp = getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1)
    infos = create_engine_group_infos_from_vllm(kv_cache_config, views, hints, dcp)
    windows = {k.group_id: k.window for k in kept}
    return [
        msgspec.structs.replace(info, sw_size_tokens=windows[info.engine_group_id])
        for info in infos
    ]


def check_views(
    views: Mapping[str, Any],
    infos: Sequence[EngineGroupInfo],
    hints: Any,
    chunk: int,
) -> None:
    """Raises:
    ValueError: if a server of this chunk size would not take these views.

    """
    groups = [indices for indices in engine_group_layer_indices(infos) if indices]
    normalized, formats = normalize_and_discover_per_layer_formats(
        list(views.values()), groups, EngineType.VLLM, hints
    )
    KVLayerGroupsManager(normalized, formats, infos, chunk, True)


def answer_refusals(client: Any) -> None:
    """Let a registration that the server refuses fail instead of time out.

    LMCache's server answers requests of one client in order, refused ones never.
    """
    register = client.register_kv_cache

    def register_or_fail(*args: Any) -> Any:
        future = register(*args)
        result = future.result

        def result_or_refusal(timeout: float) -> Any:
            if not future.wait(_PATIENCE):
                client.get_chunk_size().result(timeout=timeout)
                if not future.wait(_PATIENCE):
                    raise ConnectionRefusedError(
                        "The LMCache server refused to register the KV cache; its "
                        "log says why."
                    )
            return result(timeout=timeout)

        future.result = result_or_refusal
        return future

    client.register_kv_cache = register_or_fail


def must_be_apart(kept: Sequence[stored.Kept]) -> bool:
    """Whether this engine needs a server that keeps object groups apart."""
    return len({k.bucket for k in kept}) > 1


def store_sample(worker: Any, kept: Sequence[stored.Kept]) -> None:
    """Store the two chunks from a worker's registered KV cache, if it matters.

    Args:
        worker: The connector's ``LMCacheMPWorkerAdapter``, caches registered.
        kept: What LMCache keeps of each group's chunks.

    Raises:
        ConnectionError: if the server does not store them.

    """
    if not (must_be_apart(kept) and worker.is_kv_writer):
        return
    infos = worker.engine_group_infos
    block_ids: list[list[int]] = [
        [] for _ in range(1 + max(info.engine_group_id for info in infos))
    ]
    for k in kept:
        second = _REAL_BLOCK if k.bucket == kept[0].bucket else stored.NULL_BLOCK
        block_ids[k.group_id] = [_REAL_BLOCK] * k.per_chunk + [second] * k.per_chunk
    request_id = f"logical-blocks-{uuid.uuid4()}"
    is_stored = worker.transfer_ctx.submit_store(
        request_id,
        _sample_key(worker, request_id),
        worker.kv_caches,
        expand_engine_block_ids(infos, block_ids),
        worker.transfer_ctx.create_recorded_event(),
        worker.blocks_in_chunk,
    ).result(timeout=TIMEOUT)
    if not is_stored:
        raise ConnectionRefusedError(
            "The LMCache server refused to store a sample of two chunks; its log says "
            "why."
        )


def check_sample(adapter: Any, client: Any, kept: Sequence[stored.Kept]) -> None:
    """Look the two chunks up on a server that all workers store them on.

    Args:
        adapter: A scheduler's or a worker's LMCache adapter, in its namespace.
        client: The adapter's request client for the server.
        kept: What LMCache keeps of each group's chunks.

    Raises:
        ValueError: if the server does not keep object groups apart, or if it cannot be
            found out.

    """
    if not must_be_apart(kept):
        return
    chunks, deadline = 0, time.monotonic() + _SAMPLE_TIMEOUT
    while not chunks and time.monotonic() < deadline:
        request_id = f"logical-blocks-{uuid.uuid4()}"
        key = _sample_key(adapter, request_id).no_worker_id_version()
        readers = adapter.parallel_strategy.kv_tp_size
        client.lookup(key, readers).result(timeout=TIMEOUT)
        status = client.wait_prefetch_status(request_id, _SAMPLE_TIMEOUT)
        chunks = status.result(timeout=TIMEOUT)
        if chunks:
            client.free_lookup_locks(key, readers).result(timeout=TIMEOUT)
            client.end_session(request_id)
        else:
            # Not stored yet. A server that knows no such model never answers more.
            time.sleep(_PAUSE)
    serve = command(adapter.lmcache_tokens_per_chunk)
    if not chunks:
        raise ValueError(
            "LMCache's server did not keep a sample of two chunks for "
            f"{_SAMPLE_TIMEOUT:.0f} s, so it is unknown whether it keeps KV cache "
            f"groups apart. Give it memory (--l1-size-gb): `{serve}`."
        )
    if chunks > 1:
        raise ValueError(
            "LMCache's server does not keep KV cache groups apart: it served 2 chunks "
            "of a sample where 1 is whole, and would serve garbage for the null blocks "
            f"of Mamba states and windows. Start it with `{serve}`."
        )


def _sample_key(adapter: Any, request_id: str) -> Any:
    """Two chunks of tokens, the same for all of a namespace at every start."""
    rng = random.Random(f"logical-blocks-{adapter.model_name}")
    size = 2 * adapter.lmcache_tokens_per_chunk
    tokens = [rng.getrandbits(31) for _ in range(size)]
    return adapter._create_key(tokens, 0, size, request_id=request_id)
