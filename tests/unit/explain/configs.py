"""Real models: what of their public configs decides how the KV cache is paged.

Values that do not (token ids, initialisers, rope scaling) are left out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_patches.explain import Options, explain


@dataclass(frozen=True)
class Model:
    """A model, and how it is usually served."""

    config: Mapping[str, Any]
    attention_backend: str = "FLASH_ATTN"
    tensor_parallel_size: int = 1
    kernel_block_sizes: tuple[int, ...] = ()

    def explain(self, folder: Path):
        """What vLLM does to its KV cache, from a config saved in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {"dtype": "bfloat16", **self.config}
        (folder / "config.json").write_text(json.dumps(config))
        options = Options(
            attention_backend=self.attention_backend,
            tensor_parallel_size=self.tensor_parallel_size,
            kernel_block_sizes=self.kernel_block_sizes,
        )
        return explain(folder, options)


def _layers(count: int, *kinds: str) -> list[str]:
    """Layer types, the given ones over and over."""
    return [kinds[i % len(kinds)] for i in range(count)]


def _windows(count: int, before_full: int) -> list[str]:
    return _layers(count, *["sliding_attention"] * before_full, "full_attention")


_QWEN3_NEXT = dict(
    architectures=["Qwen3NextForCausalLM"],
    model_type="qwen3_next",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=5120,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    full_attention_interval=4,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    max_position_embeddings=262144,
)
_NEMOTRON_H = dict(
    architectures=["NemotronHForCausalLM"],
    model_type="nemotron_h",
    vocab_size=131072,
    hidden_size=4096,
    intermediate_size=21504,
    num_hidden_layers=52,
    hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    ssm_state_size=128,
    mamba_num_heads=128,
    mamba_head_dim=64,
    n_groups=8,
    conv_kernel=4,
    max_position_embeddings=8192,
)
_KIMI_LINEAR = dict(
    architectures=["KimiLinearForCausalLM"],
    model_type="kimi_linear",
    vocab_size=163840,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=27,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=72,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    mla_use_nope=True,
    num_experts=256,
    num_experts_per_token=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    moe_router_activation_func="sigmoid",
    model_max_length=1048576,
    linear_attn_config=dict(
        full_attn_layers=[4, 8, 12, 16, 20, 24, 27],
        kda_layers=[i for i in range(1, 27) if i % 4],
        head_dim=128,
        num_heads=32,
        short_conv_kernel_size=4,
    ),
)
_JAMBA = dict(
    architectures=["JambaForCausalLM"],
    model_type="jamba",
    vocab_size=65536,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    attn_layer_offset=4,
    attn_layer_period=8,
    expert_layer_offset=1,
    expert_layer_period=2,
    num_experts=16,
    num_experts_per_tok=2,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_dt_rank=256,
    max_position_embeddings=262144,
)
_GRANITE_4 = dict(
    architectures=["GraniteMoeHybridForCausalLM"],
    model_type="granitemoehybrid",
    vocab_size=100352,
    hidden_size=4096,
    intermediate_size=768,
    shared_intermediate_size=1536,
    num_hidden_layers=40,
    num_attention_heads=32,
    num_key_value_heads=8,
    layer_types=_layers(40, *["mamba"] * 5, "attention", *["mamba"] * 4),
    num_local_experts=72,
    num_experts_per_tok=10,
    mamba_n_heads=128,
    mamba_d_head=64,
    mamba_d_state=128,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_n_groups=1,
    max_position_embeddings=131072,
)
_LFM2_FULL = (2, 5, 8, 10, 12, 14)
_LFM2 = dict(
    architectures=["Lfm2ForCausalLM"],
    model_type="lfm2",
    vocab_size=65536,
    hidden_size=2048,
    intermediate_size=12288,
    block_ff_dim=12288,
    block_dim=2048,
    conv_dim=2048,
    conv_dim_out=2048,
    conv_L_cache=3,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    layer_types=["full_attention" if i in _LFM2_FULL else "conv" for i in range(16)],
    max_position_embeddings=128000,
)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return dict(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        layer_types=_windows(layers, 1),
        num_local_experts=experts,
        num_experts_per_tok=4,
        max_position_embeddings=131072,
    )


_GEMMA_2 = dict(
    architectures=["Gemma2ForCausalLM"],
    model_type="gemma2",
    vocab_size=256000,
    hidden_size=4608,
    intermediate_size=36864,
    num_hidden_layers=46,
    num_attention_heads=32,
    num_key_value_heads=16,
    head_dim=128,
    sliding_window=4096,
    layer_types=_windows(46, 1),
    query_pre_attn_scalar=144,
    max_position_embeddings=8192,
)
_GEMMA_3 = dict(
    architectures=["Gemma3ForCausalLM"],
    model_type="gemma3_text",
    vocab_size=262208,
    hidden_size=5376,
    intermediate_size=21504,
    num_hidden_layers=62,
    num_attention_heads=32,
    num_key_value_heads=16,
    head_dim=128,
    sliding_window=1024,
    layer_types=_windows(62, 5),
    query_pre_attn_scalar=168,
    max_position_embeddings=131072,
)
_GEMMA_3N = dict(
    architectures=["Gemma3nForCausalLM"],
    model_type="gemma3n_text",
    vocab_size=262400,
    hidden_size=2048,
    intermediate_size=[16384] * 35,
    num_hidden_layers=35,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    sliding_window=512,
    num_kv_shared_layers=15,
    layer_types=_windows(35, 4),
    max_position_embeddings=32768,
)
_LLAMA_4 = dict(
    architectures=["Llama4ForCausalLM"],
    model_type="llama4_text",
    vocab_size=202048,
    hidden_size=5120,
    intermediate_size=8192,
    intermediate_size_mlp=16384,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    attention_chunk_size=8192,
    no_rope_layers=[1, 1, 1, 0] * 12,
    interleave_moe_layer_step=1,
    num_local_experts=16,
    num_experts_per_tok=1,
    max_position_embeddings=10485760,
)
_OLMO_3 = dict(
    architectures=["Olmo3ForCausalLM"],
    model_type="olmo3",
    vocab_size=100278,
    hidden_size=5120,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    sliding_window=4096,
    layer_types=_windows(64, 3),
    max_position_embeddings=65536,
)
_EXAONE_4 = dict(
    architectures=["Exaone4ForCausalLM"],
    model_type="exaone4",
    vocab_size=102400,
    hidden_size=5120,
    intermediate_size=27392,
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    sliding_window=4096,
    sliding_window_pattern="LLLG",
    layer_types=_windows(64, 3),
    max_position_embeddings=131072,
)
_COMMAND_A = dict(
    architectures=["Cohere2ForCausalLM"],
    model_type="cohere2",
    vocab_size=256000,
    hidden_size=12288,
    intermediate_size=36864,
    num_hidden_layers=64,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    sliding_window=4096,
    layer_types=_windows(64, 3),
    max_position_embeddings=131072,
)
_MISTRAL = dict(
    architectures=["MistralForCausalLM"],
    model_type="mistral",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    sliding_window=4096,
    max_position_embeddings=32768,
)
_DEEPSEEK_V3 = dict(
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    first_k_dense_replace=3,
    moe_layer_freq=1,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    max_position_embeddings=163840,
)
_DEEPSEEK_V3_2 = _DEEPSEEK_V3 | dict(
    architectures=["DeepseekV32ForCausalLM"],
    model_type="deepseek_v32",
    index_head_dim=128,
    index_n_heads=64,
    index_topk=2048,
)
_KIMI_K2 = _DEEPSEEK_V3 | dict(
    model_type="kimi_k2",
    vocab_size=163840,
    num_attention_heads=64,
    num_key_value_heads=64,
    n_routed_experts=384,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    routed_scaling_factor=2.827,
    max_position_embeddings=131072,
)
_DEEPSEEK_V2_LITE = _DEEPSEEK_V3 | dict(
    architectures=["DeepseekV2ForCausalLM"],
    model_type="deepseek_v2",
    vocab_size=102400,
    hidden_size=2048,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    q_lora_rank=None,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    scoring_func="softmax",
    topk_method="greedy",
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
)
_GLM_4_7_FLASH = _DEEPSEEK_V3 | dict(
    architectures=["Glm4MoeLiteForCausalLM"],
    model_type="glm4_moe_lite",
    vocab_size=154880,
    hidden_size=2048,
    intermediate_size=10240,
    moe_intermediate_size=1536,
    num_hidden_layers=47,
    num_attention_heads=20,
    num_key_value_heads=20,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    v_head_dim=256,
    n_routed_experts=64,
    num_experts_per_tok=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    routed_scaling_factor=1.8,
    max_position_embeddings=202752,
)

# What FlashInfer takes: it cannot be imported where its own package is missing.
_FLASHINFER = (16, 32, 64)

MODELS: Mapping[str, Model] = {
    "Qwen3-Next-80B-A3B": Model(_QWEN3_NEXT),
    "Qwen3-Next-80B-A3B, TP 4": Model(_QWEN3_NEXT, "FLASHINFER", 4, _FLASHINFER),
    "Nemotron-H-8B": Model(_NEMOTRON_H),
    "Kimi-Linear-48B-A3B": Model(_KIMI_LINEAR, "FLASHMLA"),
    "Jamba-1.5-Mini": Model(_JAMBA),
    "Granite-4.0-H-Small": Model(_GRANITE_4),
    "LFM2-1.2B": Model(_LFM2),
    "gpt-oss-20b": Model(_gpt_oss(24, 32)),
    "gpt-oss-120b": Model(_gpt_oss(36, 128)),
    "Gemma-2-27B": Model(_GEMMA_2),
    "Gemma-3-27B": Model(_GEMMA_3),
    "Gemma-3n-E4B": Model(_GEMMA_3N),
    "Llama-4-Scout, TP 8": Model(_LLAMA_4, tensor_parallel_size=8),
    "Olmo-3-32B": Model(_OLMO_3),
    "EXAONE-4.0-32B": Model(_EXAONE_4),
    "Command-A, TP 8": Model(_COMMAND_A, tensor_parallel_size=8),
    "Mistral-7B-v0.1": Model(_MISTRAL),
    "DeepSeek-V2-Lite": Model(_DEEPSEEK_V2_LITE, "FLASHMLA"),
    "DeepSeek-V3, TP 8": Model(_DEEPSEEK_V3, "FLASHMLA", 8),
    "DeepSeek-V3.2, TP 8": Model(_DEEPSEEK_V3_2, "FLASHMLA_SPARSE", 8),
    "Kimi-K2, TP 8": Model(_KIMI_K2, "FLASHMLA", 8),
    "GLM-4.7-Flash": Model(_GLM_4_7_FLASH, "FLASHMLA"),
}
