"""What is asked: a model's config, and the options that an engine would get."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_patches.errors import PatchesError

CONFIG = "config.json"
CONNECTOR = "LMCacheLogicalConnector"


@dataclass(frozen=True)
class Options:
    """Options of `vllm serve` that decide how the KV cache is paged; None is vLLM's
    default."""

    attention_backend: str | None = None
    kernel_block_sizes: tuple[int, ...] = ()
    """Tokens per kernel block, in place of those that the backend takes."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    kv_cache_dtype: str | None = None
    mamba_cache_mode: str | None = None
    block_size: int | None = None
    kv_cache_layout: str | None = None

    def engine_args(self) -> dict[str, Any]:
        """Those that are vLLM's engine arguments and not left out."""
        aside = ("attention_backend", "kernel_block_sizes", "kv_cache_layout")
        return {k: v for k, v in vars(self).items() if k not in aside and v}

    def command(self, model: str) -> str:
        """The `vllm serve` command of an engine with the connector."""
        given = self.engine_args()
        if self.attention_backend:
            given["attention_backend"] = self.attention_backend
        words = ["vllm", "serve", model, "--enable-prefix-caching"]
        for name, value in given.items():
            if value != getattr(Options, name):
                words += [f"--{name.replace('_', '-')}", str(value)]
        words += ["--kv-transfer-config", json.dumps(transfer_config())]
        layout = self.kv_cache_layout
        return (f"VLLM_KV_CACHE_LAYOUT={layout} " if layout else "") + shlex.join(words)


def transfer_config() -> dict[str, Any]:
    """The connector's, for a server at LMCache's default address."""
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": 5555,
        },
    }


def model_folder(path: Path) -> Path:
    """The folder of a model's `config.json`, given as either.

    Raises:
        PatchesError: if there is no such config.

    """
    file = path / CONFIG if path.is_dir() else path
    if file.name != CONFIG:
        raise PatchesError(f"{file}: give a {CONFIG}, or the folder it is in")
    try:
        config = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no text"
        raise PatchesError(f"{file} cannot be read: {why}") from None
    except json.JSONDecodeError as e:
        raise PatchesError(f"{file} is no JSON: {e}") from None
    if not (isinstance(config, dict) and config.get("architectures")):
        raise PatchesError(f"{file} is no model's config: it names no architectures")
    return file.parent
