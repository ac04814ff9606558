"""Whether the LMCache server keeps KV cache groups apart.

In mamba "align" mode a scheduler step that advances several blocks leaves a state only
at its end; the blocks before are the null block. A server that puts all groups into one
object commits such a block, because its attention part is real, and later serves
garbage as a Mamba state. One that runs with ``--separate-object-groups`` skips it
(``all_null_chunk_masks``, lmcache/v1/multiprocess/modules/lmcache_driven_transfer.py).

The flag cannot be asked for over the message port. So each engine stores two chunks
under tokens of its own before its first request: one with real blocks, one whose Mamba
block is null. Looking them up tells how the server is run: one chunk, or both.
"""

import random
import time
import uuid
from typing import Any

from lmcache.v1.multiprocess.group_view import expand_engine_block_ids

_NULL_BLOCK = 0
_REAL_BLOCK = 1
_REMEDY = (
    "Start it with `lmcache server --separate-object-groups`; without, hybrid models "
    "get garbage Mamba states from the cache."
)


def _tokens(engine_id: str, chunk_size: int) -> list[int]:
    """Two chunks of tokens, the same for all roles of one engine."""
    rng = random.Random(f"logical-blocks-{engine_id}")
    return [rng.getrandbits(31) for _ in range(2 * chunk_size)]


def store_sample(worker: Any, engine_id: str, timeout: float = 60) -> None:
    """Store the two chunks from a worker's registered KV cache.

    Args:
        worker: The connector's ``LMCacheMPWorkerAdapter``, caches registered.
        engine_id: Identifies the engine among all that use the server.
        timeout: Seconds to wait for the server.

    """
    if not worker.is_kv_writer:
        return
    tokens = _tokens(engine_id, worker.lmcache_tokens_per_chunk)
    infos = worker.engine_group_infos
    # A list of block ids per engine group; groups never registered stay empty.
    block_ids: list[list[int]] = [
        [] for _ in range(1 + max(info.engine_group_id for info in infos))
    ]
    for info in infos:
        count = worker.lmcache_tokens_per_chunk // info.tokens_per_block
        second = _NULL_BLOCK if info.recurrent_state else _REAL_BLOCK
        block_ids[info.engine_group_id] = [_REAL_BLOCK] * count + [second] * count
    request_id = f"logical-blocks-{uuid.uuid4()}"
    worker.transfer_ctx.submit_store(
        request_id,
        worker._create_key(tokens, 0, len(tokens), request_id=request_id),
        worker.kv_caches,
        expand_engine_block_ids(infos, block_ids),
        worker.create_recorded_event(),
        worker.blocks_in_chunk,
    ).result(timeout=timeout)


def check_stored(scheduler: Any, engine_id: str, timeout: float = 60) -> None:
    """Look the two chunks up on every server.

    Args:
        scheduler: The connector's ``LMCacheMPSchedulerAdapter``.
        engine_id: As for ``store_sample``, which every worker has called.
        timeout: Seconds to wait for the server.

    Raises:
        ValueError: if a server does not keep KV cache groups apart, or if it cannot be
            found out.

    """
    tokens = _tokens(engine_id, scheduler.lmcache_tokens_per_chunk)
    for url, client in scheduler.req_clients.items():
        chunks, deadline = 0, time.monotonic() + timeout
        while not chunks and time.monotonic() < deadline:
            request_id = f"logical-blocks-{uuid.uuid4()}"
            key = scheduler._create_key(tokens, 0, len(tokens), request_id=request_id)
            key = key.no_worker_id_version()
            client.lookup(key, scheduler.tp_size).result(timeout=timeout)
            chunks = client.wait_prefetch_status(request_id, timeout).result(timeout)
            client.free_lookup_locks(key, scheduler.tp_size).result(timeout=timeout)
            client.end_session(request_id).result(timeout=timeout)
            if not chunks:
                time.sleep(0.1)
        if not chunks:
            raise ValueError(
                f"The LMCache server at {url} did not keep a sample of two chunks for "
                f"{timeout:.0f} s, so it is unknown whether it keeps KV cache groups "
                f"apart. Give it memory (--l1-size-gb). {_REMEDY}"
            )
        if chunks > 1:
            raise ValueError(
                f"The LMCache server at {url} does not keep KV cache groups apart: it "
                f"served {chunks} chunks where 1 has a Mamba state. {_REMEDY}"
            )
