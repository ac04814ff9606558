"""Engines as the namespace sees them: vLLM's own configs, planning and allocation."""

from pathlib import Path
from typing import Any

import torch
from lmcache.integration.vllm.lmcache_mp_connector import (
    build_parallel_strategy_from_vllm_config,
)
from transformers import Qwen3Config
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.logical_blocks import build_logical_kv_caches
from vllm.v1.worker.utils import allocate_kv_cache

from lmcache_hook import namespace

NUM_BLOCKS = 16
_BYTES = 1 << 30


def save_config(folder: Path, **changes: Any) -> str:
    """A model folder with a config and no weights."""
    config: dict[str, Any] = dict(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        max_position_embeddings=8192,
    )
    Qwen3Config(**config | changes).save_pretrained(folder)
    return str(folder)


def configure(model: str, **args: Any) -> VllmConfig:
    """The config of an engine with the connector on that model."""
    transfer = {"kv_connector": "LMCacheLogicalConnector", "kv_role": "kv_both"}
    return EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        **{"kv_transfer_config": transfer, "max_model_len": 64, **args},
    ).create_engine_config()


def documents(config: VllmConfig, ranks: list[dict[str, Any]]) -> list[Any]:
    """Each rank's document, its layers' specs given: grouped, projected and allocated
    by vLLM."""
    config.cache_config.kv_cache_layout = "LBHNC"
    config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    plans = get_kv_cache_configs(config, ranks, [_BYTES] * len(ranks))
    said = []
    for plan in plans:
        sizes = [group.kv_cache_spec.block_size for group in plan.kv_cache_groups]
        layout, cpu = KVCacheLayout["LBHNC"], torch.device("cpu")
        caches = allocate_kv_cache(plan, cpu, layout, sizes)
        said.append(build_logical_kv_caches(plan, caches, sizes, "LBHNC").document)
    return said


def engine(
    vllm_config: VllmConfig,
    ranks: list[dict[str, Any]],
    mla_only: bool = False,
    **parallel: int,
) -> dict[str, Any]:
    """The engine's document, from its ranks' layers.

    Args:
        vllm_config: Of one worker; ``parallel`` is set for the time of the call.
        ranks: Rank -> layer name -> spec.
        mla_only: Whether tensor-parallel ranks hold the same bytes.
        parallel: Fields of vLLM's parallel config.

    """
    config = vllm_config.parallel_config
    changes = {"world_size": len(ranks), **parallel}
    before = {field: getattr(config, field) for field in (*changes, "rank")}
    own = documents(vllm_config, ranks)
    try:
        parts = []
        for field, value in changes.items():
            setattr(config, field, value)
        for rank, document in enumerate(own):
            config.rank = rank
            strategy = build_parallel_strategy_from_vllm_config(vllm_config, 1)
            strategy.mla_only = mla_only
            parts.append((strategy.kv_worker_id, document))
        return namespace.document(vllm_config, strategy, parts)
    finally:
        for field, value in before.items():
            setattr(config, field, value)
