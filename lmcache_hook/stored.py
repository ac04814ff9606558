"""What: only chunks whose kept blocks are all real pages are stored.

A block id may be the null block: between two states of a Mamba group, before a window,
before a local chunk. LMCache skips a chunk only if all its block ids are null, but
keeps the last ones of a chunk for a group with a window
(lmcache/v1/multiprocess/object_group_transfer.py). So a chunk of which a group would
keep a null block is handed over as null, for every group that shares its object. So is
a state that is not that of the chunk's end.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

NULL_BLOCK = 0


def leaf_spec(group: Any) -> Any:
    """A group's spec; of a uniform group any, since all have one window."""
    spec = group.kv_cache_spec
    is_uniform = isinstance(spec, UniformTypeKVCacheSpecs) and spec.kv_cache_specs
    return next(iter(spec.kv_cache_specs.values())) if is_uniform else spec


class Kept(NamedTuple):
    """What LMCache keeps of each chunk for one engine group."""

    group_id: int
    window: int
    """Tokens that are kept before a chunk's end; -1 for all."""
    bucket: tuple[bool, int]
    """Groups of one bucket share an object (lmcache/v1/kv_layer_groups.py)."""
    per_chunk: int
    """Blocks per chunk."""
    last: int
    """Blocks of a chunk that are kept, its last ones."""


def kept(
    specs: Sequence[Any], tokens_per_block: Sequence[int], chunk: int
) -> list[Kept]:
    """What is kept for each engine group that is cached.

    A window is rounded up to whole blocks (LMCache refuses others), which keeps what
    is needed; so does a window of a local chunk's size.

    Args:
        specs: Engine group id -> spec.
        tokens_per_block: Engine group id -> tokens per block id; 0 for scratch groups.
        chunk: Tokens per LMCache chunk.

    """
    groups = []
    for group_id, (spec, block) in enumerate(zip(specs, tokens_per_block)):
        if not block:
            continue
        window = -1
        if is_recurrent := isinstance(spec, MambaSpec):
            window = spec.block_size
        elif isinstance(spec, SlidingWindowSpec):
            window = spec.sliding_window
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            window = spec.attention_chunk_size
        if window > 0:
            window = math.ceil(window / block) * block
        bucket = (is_recurrent, math.ceil(window / chunk) if window > 0 else -1)
        last = (window if 0 < window < chunk else chunk) // block
        groups.append(Kept(group_id, window, bucket, chunk // block, last))
    return groups


def null_unstorable(block_ids: Sequence[list[int]], groups: Sequence[Kept]) -> None:
    """Null the chunks of which a group, or one that shares its object, would keep a
    null block, in place.

    Args:
        block_ids: Engine group id -> its block ids, whole chunks.
        groups: What LMCache keeps of them.

    """
    chunks = {len(block_ids[g.group_id]) // g.per_chunk for g in groups}
    for chunk in range(max(chunks, default=0)):
        spoiled = set()
        for g in groups:
            end = (chunk + 1) * g.per_chunk
            if NULL_BLOCK in block_ids[g.group_id][end - g.last : end]:
                spoiled.add(g.bucket)
        for g in groups:
            if g.bucket in spoiled:
                start = chunk * g.per_chunk
                nulls = [NULL_BLOCK] * g.per_chunk
                block_ids[g.group_id][start : start + g.per_chunk] = nulls


def null_checkpoints(
    op: Any, specs: Sequence[Any], tokens_per_block: Sequence[int], blocks: Any
) -> None:
    """Null the states that are not those of all tokens up to their block's end.

    From 0.32 on the step that ends a prompt may leave a state from its midst in the
    last block but one (``MambaSpec.num_prefill_checkpoint_blocks``), and with EAGLE, or
    a finer ``--prefix-match-unit``, that state is of fewer tokens. The block's hash
    says of how many (vllm/v1/core/single_type_kv_cache_manager.py).

    Args:
        op: LMCache's ``LoadStoreOp`` of a store.
        specs: Engine group id -> spec.
        tokens_per_block: Engine group id -> tokens per block id; 0 for scratch groups.
        blocks: Block id -> vLLM's ``KVCacheBlock``.

    """
    for ids, spec, tokens in zip(op.block_ids, specs, tokens_per_block):
        if not (tokens and getattr(spec, "num_prefill_checkpoint_blocks", 0)):
            continue
        for i, block in enumerate(ids):
            if blocks[block].block_hash_num_tokens != op.start + (i + 1) * tokens:
                ids[i] = NULL_BLOCK


def freed_tokens(spec: Any, num_computed: int, num_prompt: int) -> range:
    """The tokens whose blocks vLLM has freed once so many are computed.

    As vllm/v1/core/single_type_kv_cache_manager.py has it; a test holds the two
    against each other for every kind of spec.
    """
    if isinstance(spec, SlidingWindowSpec):
        return range(num_computed - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return range(num_computed - num_computed % spec.attention_chunk_size)
    if isinstance(spec, MambaSpec):
        return range(num_computed - 1)
    if window := getattr(spec, "rswa_window", 0):
        return range(num_prompt, num_computed - window)
    return range(0)


def forget_freed(
    tracker: Any, specs: Sequence[Any], tokens_per_block: Sequence[int], computed: int
) -> None:
    """Null the blocks of a request that vLLM has freed, in LMCache's tracker.

    The tracker keeps the ids it was first told, which may be another request's by now.

    Args:
        tracker: The request's ``LMCacheMPRequestTracker``.
        specs: Engine group id -> spec.
        tokens_per_block: Engine group id -> tokens per block id; 0 for scratch groups.
        computed: Tokens computed when vLLM last freed blocks.

    """
    for group_id, (spec, tokens) in enumerate(zip(specs, tokens_per_block)):
        freed = freed_tokens(spec, computed, tracker.num_prompt_tokens)
        ids = tracker.allocated_block_ids.get(group_id)
        if not (ids and tokens and freed):
            continue
        end = min(len(ids), freed.stop // tokens)
        start = max(-(-freed.start // tokens), tracker.forgotten.get(group_id, 0))
        if start < end:
            ids[start:end] = [NULL_BLOCK] * (end - start)
            tracker.forgotten[group_id] = end
