"""A checked engine's process: ``python -m vllm_patches.check.engine JOB.json``.

Takes vLLM's own flags, by vLLM's own parser. The first engine answers each prompt
three times: computed and stored, then twice from its own prefix cache. The second one
answers each once, from LMCache.
"""

import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_patches.check.verdict import Answer

CHUNKS = (3, 4, 5)
"""Whole chunks of each prompt."""
MAX_TOKENS = 8
FOLDER = "vllm_patches.check.folder"
"""In the connector's extra config: the engine's folder."""
WANTED = "wanted.json"
"""Beside that folder: the server that an engine waits for (audit.py)."""
NOTES = "notes-*.jsonl"
"""In that folder: what each worker notes (audit.py)."""
ANSWERS = "answers.json"
"""In that folder: the engine's answers, of each pass."""

_TOP = 5
_SETTLE_TIMEOUT = 120.0


@dataclass
class Job:
    folder: str
    """The engine's own, for what it notes."""
    port: int
    """Message port of the LMCache server to use."""
    arguments: list[str]
    """vLLM's flags."""
    connector: str
    """Of audit.py."""
    passes: int
    """How often each prompt is asked."""


def parse(arguments: list[str]) -> Any:
    """vLLM's ``EngineArgs``; what it does not know ends the process with status 2."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    parser = FlexibleArgumentParser(prog="vllm-patches check")
    EngineArgs.add_cli_args(parser)
    return EngineArgs.from_cli_args(parser.parse_args(arguments))


def transfer_config(given: Any, job: Job) -> Any:
    """The connector on the private server, with what else the user configured."""
    from vllm.config import KVTransferConfig

    from vllm_patches.check import audit

    extra = dict(given.kv_connector_extra_config) if given else {}
    for key in [key for key in extra if key.startswith("lmcache.mp.autostart")]:
        del extra[key]
    extra.pop("lmcache.mp.server_urls", None)
    extra |= {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": job.port,
        FOLDER: job.folder,
    }
    return KVTransferConfig(
        kv_connector=job.connector,
        kv_connector_module_path=audit.__name__,
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )


def make_prompts(chunk_size: int, least_block: int, vocab_size: int) -> list[list[int]]:
    """Random token ids, cut inside a block behind whole chunks.

    vLLM's own prefix cache and LMCache then have as many of their tokens, and what an
    engine computes is cut into the same steps. Ids near both ends of a vocabulary are
    often special, so its middle half is taken.

    Args:
        chunk_size: Tokens per chunk.
        least_block: Tokens of the smallest block of any KV cache group.
        vocab_size: The model's.

    """
    rng = random.Random(0)
    ids = range(vocab_size // 4, max(vocab_size * 3 // 4, vocab_size // 4 + 1))
    lengths = [n * chunk_size + max(1, least_block // 2) for n in CHUNKS]
    return [[rng.choice(ids) for _ in range(length)] for length in lengths]


def ask(llm: Any, prompt: list[int], max_tokens: int = MAX_TOKENS) -> Answer:
    """A greedy answer, and the likeliest tokens of each step."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=_TOP,
        detokenize=False,
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    (out,) = output.outputs
    top = [
        {token: entry.logprob for token, entry in step.items()} for step in out.logprobs
    ]
    return Answer(output.num_cached_tokens or 0, list(out.token_ids), top)


def settle(llm: Any, folder: Path) -> None:
    """Let the engine step until its workers have noted the end of every transfer."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT
    while _in_flight(folder):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"LMCache has not answered a transfer for {_SETTLE_TIMEOUT:.0f} s"
            )
        ask(llm, [1], max_tokens=1)
        time.sleep(0.1)


def _in_flight(folder: Path) -> int:
    kinds = [
        json.loads(line)["note"]
        for file in folder.glob(NOTES)
        for line in file.read_text().splitlines()
    ]
    return kinds.count("submitted") - kinds.count("moved")


def main(file: str) -> None:
    job = Job(**json.loads(Path(file).read_text()))
    engine_args = parse(job.arguments)
    engine_args.kv_transfer_config = transfer_config(
        engine_args.kv_transfer_config, job
    )
    from vllm import LLM

    llm = LLM(**vars(engine_args))
    folder = Path(job.folder)
    wanted = json.loads((folder.parent / WANTED).read_text())
    model = llm.llm_engine.model_config
    prompts = make_prompts(
        wanted["chunk_size"], wanted["least_block"], model.get_vocab_size()
    )
    needed = max(map(len, prompts)) + MAX_TOKENS
    if model.max_model_len < needed:
        raise ValueError(
            f"Prompts of {max(CHUNKS)} chunks of {wanted['chunk_size']} tokens do not "
            f"fit a --max-model-len of {model.max_model_len}: give {needed} or more."
        )
    answers = []
    for _ in range(job.passes):
        answers.append([asdict(ask(llm, prompt)) for prompt in prompts])
        print(f"asked {len(prompts)} prompts", flush=True)
    settle(llm, folder)
    (folder / ANSWERS).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
