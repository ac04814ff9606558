"""Who: engines that can read each other's pages share a namespace in LMCache.

LMCache keys every object by a model name (``ObjectKey.model_name``,
lmcache/v1/distributed/api.py). A digest of all that decides an object's bytes is
appended to it, for lookups and for transfers.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
)
from vllm.distributed.parallel_state import get_world_group
from vllm.platforms import current_platform

from lmcache_hook import request_key

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

CONTRACT_VERSION = 3
"""The version of vllm/v1/worker/logical_blocks.py that this hook is written for."""

_MAX_FILE_NAME = 255
_DIGITS = 16
# Of a Hugging Face config, what says nothing about the values in a page.
_SAYS_NOTHING = ("_name_or_path", "transformers_version", "id2label", "label2id")
WEIGHTS = ("safetensors", "bin", "pt", "gguf")
# Bytes of a weight file that are read: so many, in every so many.
_SAMPLE, _EVERY = 4096, 1 << 24


@dataclass
class Fingerprint(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler about its engine's pages."""

    digest: str
    contract_version: int


def gather(part: Any, vllm_config: "VllmConfig") -> list[Any]:
    """What each worker of this engine hands in, in the order of their ranks."""
    size = vllm_config.parallel_config.world_size
    if size == 1:
        return [part]
    world = get_world_group()
    parts: list[Any] = [None] * world.world_size
    torch.distributed.all_gather_object(parts, part, group=world.cpu_group)
    # With data parallelism the world holds the ranks of several engines.
    first = world.rank // size * size
    return parts[first : first + size]


def document(
    vllm_config: "VllmConfig", strategy: Any, parts: Sequence[tuple[int, Any]]
) -> dict[str, Any]:
    """All that decides the bytes of this engine's objects in LMCache, as JSON values.

    Args:
        vllm_config: The engine's.
        strategy: LMCache's ``ParallelStrategy``: which piece of a chunk is whose.
        parts: For every worker in order, the piece it has and the document of its
            ``LogicalKVCaches``.

    Raises:
        ValueError: if the workers cannot use one namespace, naming them.

    """
    pieces: dict[int, Any] = {}
    groups: dict[int, set[int]] = {}
    for rank, (piece, own) in enumerate(parts):
        if pieces.setdefault(piece, own) != own:
            raise ValueError(
                f"Rank {rank} pages piece {piece} of LMCache's chunks differently from "
                "the rank that stores it. Run all ranks with one configuration."
            )
        groups[rank] = {group for group, _ in own["layers"]}
    every = set().union(*groups.values())
    missing = [f"rank {r} of group {g}" for r in groups for g in every - groups[r]]
    if missing:
        raise ValueError(
            f"No layer on {', '.join(missing)}: LMCache numbers KV cache groups by "
            "rank, so every pipeline rank needs a layer of every group. Use a smaller "
            "--pipeline-parallel-size, or another partition "
            "(VLLM_PP_LAYER_PARTITION)."
        )
    ordered = [pieces[piece] for piece in sorted(pieces)]
    formats = [p for i, p in enumerate(ordered) if p not in ordered[:i]]
    parallel = vllm_config.parallel_config
    dcp = parallel.decode_context_parallel_size
    engine = {
        "contract": CONTRACT_VERSION,
        "model": _model(vllm_config),
        "parallel": {
            "tensor": 1 if strategy.mla_only else parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "decode context": dcp,
            "prefill context": getattr(parallel, "prefill_context_parallel_size", 1),
            "interleave": parallel.cp_kv_cache_interleave_size if dcp > 1 else 1,
            "servers": strategy.n_servers,
        },
        "ranks": [formats.index(p) for p in ordered],
        "pages": formats,
    }
    return json.loads(json.dumps(engine, default=str))


def _model(vllm_config: "VllmConfig") -> dict[str, Any]:
    """What of the model decides the values in a page."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    dtype = "fp8_e4m3" if cache.cache_dtype == "fp8" else str(cache.cache_dtype)
    if dtype.startswith("fp8"):
        dtype += f" {current_platform.fp8_dtype()}"
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    scales = getattr(cache, "calculate_kv_scales", False)
    transfer: Any = vllm_config.kv_transfer_config
    return {
        **_weights(model),
        "drafter": _weights(drafter) if drafter not in (None, model) else {},
        "kv cache dtype": dtype,
        # Scales found at run time are one engine's own.
        "kv scales of": transfer.engine_id if scales else "",
    }


def _weights(model: "ModelConfig") -> dict[str, Any]:
    config = model.hf_config.to_dict()
    commit = getattr(model.hf_config, "_commit_hash", None)
    return {
        "config": {k: v for k, v in config.items() if k not in _SAYS_NOTHING},
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        "revision": str(commit or model.revision or ""),
        "weights": _sample_weights(Path(model.model)),
    }


def _sample_weights(folder: Path) -> str:
    """A digest of a local model's weights, from samples of its files.

    Weights that were trained on, or replaced below one path, differ in every sample.
    """
    digest = hashlib.sha256()
    for file in sorted(f for s in WEIGHTS for f in folder.glob(f"*.{s}")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as f:
            for at in (*range(0, size, _EVERY), max(0, size - _SAMPLE)):
                digest.update(os.pread(f.fileno(), _SAMPLE, at))
    return digest.hexdigest()


def name(model_name: str, digest: str) -> str:
    """The namespace of a model's pages with this fingerprint (hex).

    A model name that would make LMCache's keys invalid, or the file names of its disk
    tier too long, is cut to the last part of the path and a digest of it all.
    """
    suffix = f"##logical-{digest[:_DIGITS]}"
    if (
        "@" not in model_name
        and _file_name_bytes(model_name + suffix) <= _MAX_FILE_NAME
    ):
        return model_name + suffix
    short = hashlib.sha256(model_name.encode()).hexdigest()[:_DIGITS]
    last = Path(model_name).name.replace("@", "-")
    while _file_name_bytes(f"{last}-{short}{suffix}") > _MAX_FILE_NAME:
        last = last[:-1]
    return f"{last}-{short}{suffix}"


def _file_name_bytes(model_name: str) -> int:
    salt = "s" * request_key.MAX_SALT
    key = ObjectKey(
        bytes(32), model_name, 0xFFFFFFFF, object_group_id=0xFF, cache_salt=salt
    )
    return len(_object_key_to_filename(key).encode())


def check_contract(version: int) -> None:
    """Raises:
    RuntimeError: if the views follow another contract than this hook's.

    """
    if version != CONTRACT_VERSION:
        raise RuntimeError(
            f"This vLLM's logical blocks follow contract {version}, the connector "
            f"follows {CONTRACT_VERSION}: install one vllm-logical-blocks version for "
            "both and run `vllm-patches revert` and `vllm-patches apply`."
        )


def agree(workers: Mapping[Any, Any]) -> str:
    """The one fingerprint of all workers.

    Args:
        workers: Worker's rank, or (pp rank, tp rank) -> its ``Fingerprint``.

    Raises:
        RuntimeError: if a worker follows another contract version, or what arrived
            is another connector's.
        ValueError: if the workers disagree, naming the fingerprints and workers.

    """
    ranks: dict[str, list[Any]] = {}
    for rank, metadata in workers.items():
        if not isinstance(metadata, Fingerprint):
            raise RuntimeError(
                f"The workers' handshake brought {type(metadata).__name__} instead of "
                "a fingerprint: vLLM's MultiConnector passes on one child's only. Give "
                "LMCacheLogicalConnector an engine without a second such connector."
            )
        check_contract(metadata.contract_version)
        ranks.setdefault(metadata.digest, []).append(rank)
    if len(ranks) != 1:
        raise ValueError(
            "The workers of this engine are not in one LMCache namespace: "
            + "; ".join(f"{digest} on workers {r}" for digest, r in ranks.items())
            + ". Run all workers with one configuration; `vllm-patches fingerprint` "
            "explains the difference between their logs."
        )
    return next(iter(ranks))
