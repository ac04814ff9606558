"""What vLLM makes of a model: the specs of its layers, groups, pools and views.

Every step is the one that an engine takes (vllm/v1/engine/core.py and the workers),
by vLLM's own functions; only the pool is of two blocks, on the CPU.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends import utils as attn_backend_utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.logical_blocks import LogicalKVCaches
from vllm.v1.worker.worker_base import WorkerBase

from vllm_patches.errors import PatchesError
from vllm_patches.explain import without_gpu
from vllm_patches.explain.options import Options, transfer_config

_BLOCKS = 2
_PLENTY = 1 << 60
"""Bytes of memory that the model's longest prompt surely fits in."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, as each of its ranks sees it."""

    kv_cache_config: KVCacheConfig
    layout: str
    """The resolved KV cache layout's name."""
    kernel_block_sizes: list[int]
    caches: LogicalKVCaches


@dataclass(frozen=True)
class Plan:
    vllm_config: VllmConfig
    stages: list[Stage]


def plan(folder: Path, options: Options) -> Plan:
    """What vLLM does to the KV cache of the model whose config is in the folder.

    Tensor-parallel ranks of a stage are alike, so one of them is asked.

    Raises:
        PatchesError: if vLLM takes no such model or options, or it has no KV cache.

    """
    failures: list[Exception] = []
    try:
        with without_gpu.assumed(options) as failures:
            return _plan(folder, options)
    except PatchesError:
        raise
    except Exception as e:
        refusal = " ".join("; ".join(map(_message, [e, *failures])).split())
        raise PatchesError(f"vLLM {vllm.__version__} refuses it: {refusal}") from e


def _message(error: Exception) -> str:
    """Why, in pydantic's case without its links and lines of input."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return str(error) or type(error).__name__
    reasons = []
    for each in errors():
        field = ".".join(map(str, each["loc"]))
        given = f"{field} {each['input']!r}: " if field else ""
        reasons.append(given + each["msg"].removeprefix("Value error, "))
    return "; ".join(reasons)


def _plan(folder: Path, options: Options) -> Plan:
    configs, specs = [], []
    size = options.tensor_parallel_size
    ranks = [stage * size for stage in range(options.pipeline_parallel_size)]
    for rank in ranks:
        config = _configure(folder, options)
        with without_gpu.rank_of_many(config, rank):
            without_gpu.build_model(config)
            current_platform.update_block_size_for_backend(config)
            register_all_kvcache_specs(config)
            specs.append(attn_utils.get_kv_cache_spec(config))
            layout = _resolve_layout(config, specs[-1])
        configs.append(config)
    if not any(specs):
        raise PatchesError(f"{folder}: the model has no KV cache")
    configs[0].validate_block_size()
    memory = [_PLENTY] * len(specs)
    projected = kv_cache_utils.get_kv_cache_configs(configs[0], specs, memory)
    stages = []
    for rank, config, worker in zip(ranks, configs, projected):
        with without_gpu.rank_of_many(config, rank):
            stages.append(_stage(config, worker.kv_cache_groups, layout))
    return Plan(configs[0], stages)


def _configure(folder: Path, options: Options) -> VllmConfig:
    backend: Any = options.attention_backend
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(**transfer_config()),
        attention_backend=backend if backend in without_gpu.CPUS else None,
        **options.engine_args(),
    ).create_engine_config()


def _resolve_layout(config: VllmConfig, specs: dict[str, Any]) -> str:
    """The name of the KV cache layout, which the release may not have resolved."""
    backends: Any = attn_backend_utils
    if hasattr(backends, "resolve_kv_cache_layout"):
        worker: Any = SimpleNamespace(vllm_config=config)
        supported = [WorkerBase.get_supported_kv_cache_layouts(worker)]
        return backends.resolve_kv_cache_layout(
            config, supported, list(specs.values())
        ).name
    # Up to vLLM 0.28, where the CPU's kernels are head-major whatever it says.
    if _is_for_cpu():
        return "HND"
    return backends.get_kv_cache_layout()


def _stage(config: VllmConfig, groups: list[Any], layout: str) -> Stage:
    config.cache_config.num_gpu_blocks_override = _BLOCKS
    cpu, context = torch.device("cpu"), config.compilation_config
    kv_cache_config = kv_cache_utils.get_kv_cache_config_from_groups(
        config, groups, _PLENTY
    )
    attn_groups, _, kernel_block_sizes = attn_utils.init_attn_backend(
        kv_cache_config, config, cpu
    )
    parameters = inspect.signature(attn_utils.init_kv_cache).parameters
    # Up to vLLM 0.28 it takes them by KV cache group.
    is_nested = "runner_kv_caches" in parameters
    arguments: dict[str, Any] = {
        "runner_kv_caches": [],
        "forward_context": context.static_forward_context,
        "kv_cache_config": kv_cache_config,
        "attn_groups": attn_groups if is_nested else sum(attn_groups, []),
        "device": cpu,
        "cache_dtype": config.cache_config.cache_dtype,
        "kernel_block_sizes": kernel_block_sizes,
        "vllm_config": config,
    }
    kv_caches = attn_utils.init_kv_cache(
        **{name: arguments[name] for name in parameters if name in arguments}
    )
    caches = LogicalKVCaches(
        kv_cache_config,
        kv_caches,
        kernel_block_sizes,
        layout,
        attn_groups=attn_groups,
    )
    if _is_for_cpu():
        caches = caches.with_padding()  # As the connector does there.
    return Stage(kv_cache_config, layout, kernel_block_sizes, caches)


def _is_for_cpu() -> bool:
    is_cpus_own = type(current_platform) is not without_gpu.Elsewhere
    return current_platform.is_cpu() and is_cpus_own
