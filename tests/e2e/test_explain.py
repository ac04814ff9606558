"""`vllm-patches explain` says what a running engine then registers and stores."""

import json
import re
import subprocess
import sys
from pathlib import Path

from scripts.engines import environment, roundtrip, server
from tests.e2e.conftest import settled

PROMPT = roundtrip.prompts((300,), seed=47)[0]
KERNEL_BLOCK = 32
TOOL = [sys.executable, "-c", "from vllm_patches.cli import app; app()"]


def test_what_it_says_is_what_an_engine_does(hybrid: str, run, tmp_path: Path) -> None:
    options = ["--kernel-block-size", KERNEL_BLOCK, "--block-size", 256, "--json"]
    command = [*TOOL, "explain", hybrid, *map(str, options)]
    said = json.loads(
        subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=environment.ROOT
        ).stdout
    )
    assert said["has_weights"]
    disk = tmp_path / "disk"
    disk.mkdir()
    tier = ("--l2-adapter", f'{{"type": "fs", "base_path": "{disk}"}}')
    arguments = ("--separate-object-groups", *tier)
    with (
        server.running(tmp_path / "server.log", arguments) as lmcache,
        run("engine", hybrid, lmcache, kernel_block_size=KERNEL_BLOCK) as engine,
    ):
        registered = engine.groups
        sample = settled(disk)
        engine.ask([PROMPT])
        stored = settled(disk, more_than=sample)
        log = engine.log.read_text()
    assert len(said["groups"]) == len(registered)
    for told, group in zip(said["groups"], registered):
        assert told["kind"] == group["kind"]
        assert told["layers"] == [group["layers"]]
        for field in ("block_size", "kernel_block_size", "page_size_bytes"):
            assert told[field] == group[field], field
        assert told["view"] == group["view"][1:]
    (fingerprint,) = set(re.findall(r"KV cache fingerprint ([0-9a-f]{64})", log))
    assert said["fingerprint"] == fingerprint
    # The first chunk of a prompt of 300 tokens.
    assert said["chunk_size"] == 256
    size = sum(path.stat().st_size for path in stored - sample)
    assert size == said["bytes_per_1000_tokens"] * 256 // 1000
