"""The fingerprint in LMCache's namespace: who can read whose pages.

LMCache keys every object by a model name (``ObjectKey.model_name``,
lmcache/v1/distributed/api.py). Appending the fingerprint keeps engines apart that page
the same model differently, and from what other connectors stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
)

CONTRACT_VERSION = 1
"""The version of vllm/v1/worker/logical_blocks.py that this hook is written for."""

_MAX_FILE_NAME = 255
_DIGITS = 16


@dataclass
class Fingerprint(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler about its pages."""

    digest: str
    contract_version: int


def extend(model_name: str, digest: str, cache_dtype: str = "auto") -> str:
    """The namespace of a model's pages with this fingerprint.

    Args:
        model_name: LMCache's name for the model.
        digest: The fingerprint, hex.
        cache_dtype: vLLM's ``--kv-cache-dtype``. The two fp8 formats fill tensors of
            one dtype, so the fingerprint cannot tell them apart.

    Raises:
        ValueError: if LMCache's disk tier could not name a file after it.

    """
    namespace = f"{model_name}##logical-{digest[:_DIGITS]}"
    if cache_dtype == "fp8_e5m2":
        namespace += "-e5m2"
    key = ObjectKey(bytes(32), namespace, kv_rank=0xFFFFFFFF, object_group_id=0xFF)
    length = len(_object_key_to_filename(key).encode())
    if length > _MAX_FILE_NAME:
        raise ValueError(
            f"LMCache's namespace {namespace!r} makes file names of {length} bytes, "
            f"over {_MAX_FILE_NAME}: load the model from a shorter path (a link)."
        )
    return namespace


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
        ValueError: if the workers' pages differ, naming both fingerprints and workers.

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
            "The workers of this engine page the KV cache differently: "
            + "; ".join(f"{digest} on workers {r}" for digest, r in ranks.items())
            + ". Run all workers with one attention backend and one configuration; "
            "`vllm-patches fingerprint` explains the difference between their logs."
        )
    return next(iter(ranks))
