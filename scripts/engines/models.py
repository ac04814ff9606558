"""Tiny models with random weights, made rather than downloaded."""

from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
CHOICES = ("hybrid", "plain")

# Wide enough that the output tokens differ: with the default of 0.02 they are all the
# same, and a broken cache shows nothing.
_INITIALIZER_RANGE = 0.2


def make(name: str, folder: Path) -> Path:
    """Save the model ``name`` below ``folder`` unless it is there; returns its path.

    "hybrid" is Qwen3-Next-like: three gated delta net layers and one of full attention.
    "plain" is Qwen3-like: four layers of full attention.
    """
    path = folder / name
    if (path / "config.json").exists():
        return path
    import torch
    from transformers import (
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
    )

    common: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=4,
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
    torch.manual_seed(0)
    model: Any
    if name == "hybrid":
        model = Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **common,
                linear_key_head_dim=64,
                linear_value_head_dim=64,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                shared_expert_intermediate_size=64,
            )
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    model.to(torch.bfloat16).save_pretrained(path)
    return path
