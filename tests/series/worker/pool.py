"""A hybrid model's KV cache, planned, allocated and bound by vLLM's own code.

Works on every supported release: tests/series/test_trees.py runs it in each one's tree.
"""

import importlib
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import DeviceConfig, VllmConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.worker import utils
from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # up to vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

BLOCK_SIZE = 256
NUM_BLOCKS = 12
ATTENTION = 2
"""The attention group; the groups before it are Mamba's."""
HAS_ALLOCATION = hasattr(utils, "allocate_kv_cache")
"""Whether one allocation holds all layers (vLLM 0.29 on)."""
MAPS_IN_BLOCK_TABLE = hasattr(BlockTable, "map_to_kernel_blocks")
"""Whether block tables hold kernel blocks; from vLLM 0.32 on they hold block ids."""
CPU = torch.device("cpu")


@dataclass
class Pool:
    """What a worker has once its KV cache is bound."""

    config: KVCacheConfig
    kv_caches: dict[str, Any]
    attn_groups: list[list[utils.AttentionGroup]]
    block_table: Any
    kernel_block_sizes: list[int]

    def kernel_table(self, block_ids: list[int]) -> list[int]:
        """The kernel blocks that the attention kernels get for these block ids."""
        self.block_table.add_row(tuple(block_ids for _ in self.kernel_block_sizes), 0)
        table = self.block_table[ATTENTION].block_table.cpu[:1]
        k = BLOCK_SIZE // self.kernel_block_sizes[ATTENTION]
        if MAPS_IN_BLOCK_TABLE:
            return table[0, : len(block_ids) * k].tolist()
        (group,) = self.attn_groups[ATTENTION]
        kernel_table = group.map_to_kernel_block_table(table[:, : len(block_ids)])
        return kernel_table[0].tolist()


def groups() -> list[KVCacheGroupSpec]:
    """Two Mamba groups with pages padded to those of an attention group."""
    attention = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
    )
    specs: list[KVCacheSpec] = [
        *2 * [mamba(attention.page_size_bytes)],
        attention,
    ]
    return [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]


def mamba(page_size_bytes: int) -> MambaSpec:
    return MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((3, 192), (2, 32, 32)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page_size_bytes,
        mamba_cache_mode="align",
    )


def make(kernel_block_size: int) -> Pool:
    """A pool whose attention backend takes blocks of ``kernel_block_size`` tokens."""
    vllm_config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    vllm_config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    if HAS_ALLOCATION:
        vllm_config.cache_config.kv_cache_layout = "LBHNC"
    config = get_kv_cache_config_from_groups(vllm_config, groups(), 1 << 30)
    assert config.num_blocks == NUM_BLOCKS
    kernel_block_sizes = [BLOCK_SIZE, BLOCK_SIZE, kernel_block_size]
    attn_groups = [
        [
            utils.AttentionGroup(
                CPUAttentionBackend, group.layer_names, group.kv_cache_spec, group_id
            )
        ]
        for group_id, group in enumerate(config.kv_cache_groups)
    ]
    if not MAPS_IN_BLOCK_TABLE and kernel_block_size != BLOCK_SIZE:
        (group,) = attn_groups[ATTENTION]
        k = BLOCK_SIZE // kernel_block_size
        group.kernel_block_size = kernel_block_size
        group.kernel_block_table = torch.zeros(1, 1, NUM_BLOCKS * k, dtype=torch.int32)
        group.kernel_block_offsets = torch.arange(k, dtype=torch.int32)
    return Pool(
        config,
        _allocate(config, attn_groups, kernel_block_sizes),
        attn_groups,
        _block_table(kernel_block_sizes),
        kernel_block_sizes,
    )


def _allocate(
    config: KVCacheConfig,
    attn_groups: list[list[utils.AttentionGroup]],
    kernel_block_sizes: list[int],
) -> dict[str, Any]:
    if HAS_ALLOCATION:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        layout = KVCacheLayout["LBHNC"]
        return utils.allocate_kv_cache(config, CPU, layout, kernel_block_sizes)
    attn_utils: Any = importlib.import_module("vllm.v1.worker.gpu.attn_utils")
    return attn_utils._reshape_kv_cache(
        attn_groups=[group for groups in attn_groups for group in groups],
        kv_cache_raw_tensors=attn_utils._allocate_kv_cache(config, {}, CPU),
        cache_dtype="auto",
        kernel_block_sizes=kernel_block_sizes,
        shared_kv_cache_layers={},
        kv_cache_config=config,
    )


def _block_table(kernel_block_sizes: list[int]) -> Any:
    block_sizes = [BLOCK_SIZE] * len(kernel_block_sizes)
    arguments: dict[str, Any] = {
        "max_num_reqs": 2,
        "max_model_len": BLOCK_SIZE * NUM_BLOCKS,
        "max_num_batched_tokens": BLOCK_SIZE,
        "pin_memory": False,
        "device": CPU,
        "block_sizes": block_sizes,
        "kernel_block_sizes": kernel_block_sizes,
        "max_num_blocks": [NUM_BLOCKS] * len(block_sizes),
    }
    known = inspect.signature(MultiGroupBlockTable).parameters
    table: Any = MultiGroupBlockTable(
        **{k: v for k, v in arguments.items() if k in known}
    )
    if hasattr(table, "set_kernel_block_sizes"):
        table.set_kernel_block_sizes(kernel_block_sizes)
    return table


def num_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
