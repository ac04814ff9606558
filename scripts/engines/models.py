"""Tiny models with random weights, made rather than downloaded."""

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
LAYERS = 4

# Wide enough that the output tokens differ: with the default of 0.02 they are all the
# same, and a broken cache shows nothing.
_INITIALIZER_RANGE = 0.2
_COMMON: Mapping[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=256,
    initializer_range=_INITIALIZER_RANGE,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
_HYBRID = dict(
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)
# Drafts are taken from two tokens before, so that there are some in random prompts.
_NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
}
_WINDOWS_AND_FULL = ["sliding_attention", "full_attention"] * (LAYERS // 2)


@dataclass(frozen=True)
class Family:
    """How a kind of model is made, and what its engine is started with."""

    about: str
    architecture: str
    """transformers' class prefix: ``...Config`` and ``...ForCausalLM``."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What its configuration has beyond, or other than, all others'."""
    block_size: int = 128
    """Tokens per logical block."""
    chunk_size: int = 256
    """Tokens per LMCache chunk of a round trip: it ends where vLLM's own cache does."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    drafter: bool = False
    """Whether a draft model speculates."""
    adapter: bool = False
    """Whether a LoRA adapter answers."""
    interpreter: bool = False
    """Whether it needs Triton's kernels, which the interpreter runs on a CPU."""


FAMILIES: Mapping[str, Family] = {
    "hybrid": Family(
        "Qwen3-Next-like: three gated delta net layers, one of full attention",
        "Qwen3Next",
        _HYBRID,
        block_size=256,
    ),
    "plain": Family("Qwen3-like: full attention only", "Qwen3", block_size=256),
    "hybrid-ngram": Family(
        "hybrid, with n-gram speculation: a Mamba group's table has extra blocks",
        "Qwen3Next",
        _HYBRID,
        block_size=256,
        # Steps of two blocks: the extra ones move from step to step.
        engine_args={**_NGRAM, "max_num_batched_tokens": 600, "max_num_seqs": 4},
        interpreter=True,
    ),
    "plain-ngram": Family(
        "plain, with n-gram speculation", "Qwen3", block_size=256, engine_args=_NGRAM
    ),
    "plain-draft": Family(
        "plain, with a draft model", "Qwen3", block_size=256, drafter=True
    ),
    "plain-lora": Family(
        "plain, with a LoRA adapter",
        "Qwen3",
        block_size=256,
        engine_args={"enable_lora": True, "max_lora_rank": 8},
        adapter=True,
    ),
    "mistral": Family(
        "sliding windows of 256 tokens only, which vLLM pages by the kernel block",
        "Mistral",
        dict(sliding_window=256),
        chunk_size=32,
    ),
    "gemma3": Family(
        "Gemma-3-like: windows of 64 tokens, less than a block, and full attention",
        "Gemma3",
        dict(
            sliding_window=64,
            layer_types=_WINDOWS_AND_FULL,
            query_pre_attn_scalar=64,
            tie_word_embeddings=True,
        ),
    ),
    "gpt-oss": Family(
        "sinks; windows of 128 tokens and full attention",
        "GptOss",
        dict(
            sliding_window=128,
            layer_types=_WINDOWS_AND_FULL,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
    ),
    "llama4": Family(
        "Llama-4-like: attention local to chunks of 256 tokens, and full attention",
        "Llama4",
        dict(
            attention_chunk_size=256,
            no_rope_layers=[1, 0, 1, 0],
            interleave_moe_layer_step=1,
            intermediate_size_mlp=256,
            num_local_experts=4,
            num_experts_per_tok=1,
        ),
    ),
    "olmo3": Family(
        "Olmo-3-like: windows of 256 tokens and full attention",
        "Olmo3",
        dict(sliding_window=256, layer_types=_WINDOWS_AND_FULL),
    ),
    "deepseek": Family(
        "DeepSeek-V2-like: latent attention (MLA)",
        "DeepseekV2",
        dict(
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=64,
            head_dim=64,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
        ),
    ),
}


def make(name: str, folder: Path) -> Path:
    """Save the model of the family ``name`` below ``folder``; returns its path.

    What is there already is kept.
    """
    return _save(FAMILIES[name], folder / name)


def engine_args(name: str, folder: Path) -> dict[str, Any]:
    """What an engine of the family ``name`` is started with, beside its model.

    What that needs is saved below ``folder``.
    """
    family = FAMILIES[name]
    args = {"block_size": family.block_size, **family.engine_args}
    if family.drafter:
        args["speculative_config"] = {
            "method": "draft_model",
            "model": str(make_draft(folder)),
            "num_speculative_tokens": 2,
        }
    return args


def make_draft(folder: Path) -> Path:
    """Save a draft model for "plain": of its vocabulary, with one layer."""
    plain = FAMILIES["plain"]
    config = {**plain.config, "num_hidden_layers": 1}
    draft = Family("a draft model for plain", plain.architecture, config)
    return _save(draft, folder / "draft")


def _save(family: Family, path: Path) -> Path:
    if (path / "config.json").exists():
        return path
    import torch
    import transformers

    model_class = getattr(transformers, f"{family.architecture}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(_config(family))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as fresh:
        model.to(torch.bfloat16).save_pretrained(fresh)
        with suppress(OSError):  # Another process was first.
            os.rename(fresh, path)
    return path


def make_config(name: str, folder: Path) -> Path:
    """Save the config of the family ``name`` below ``folder``, without weights."""
    family, path = FAMILIES[name], folder / name
    config = _config(family)
    config.architectures = [f"{family.architecture}ForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(path)
    return path


def _config(family: Family) -> Any:
    import transformers

    # The models of text and images have a configuration of this name.
    text = "Text" if family.architecture in ("Gemma3", "Llama4") else ""
    config_class = getattr(transformers, f"{family.architecture}{text}Config")
    return config_class(**{**_COMMON, **family.config})


def make_adapter(seed: int, folder: Path, rank: int = 8) -> Path:
    """Save a LoRA adapter of "plain" below ``folder``; returns its path.

    It changes the queries, keys and values of every layer, enough to change answers.
    """
    path = folder / f"adapter-{seed}"
    if (path / "adapter_config.json").exists():
        return path
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    hidden, head = _COMMON["hidden_size"], _COMMON["head_dim"]
    heads = {
        "q": _COMMON["num_attention_heads"],
        "k": _COMMON["num_key_value_heads"],
        "v": _COMMON["num_key_value_heads"],
    }
    weights = {}
    for layer in range(LAYERS):
        for projection, count in heads.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}_proj."
            for part, shape in (("A", (rank, hidden)), ("B", (count * head, rank))):
                weight = torch.randn(shape, generator=generator) * _INITIALIZER_RANGE
                weights[f"{name}lora_{part}.weight"] = weight.to(torch.bfloat16)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [f"{projection}_proj" for projection in heads],
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
