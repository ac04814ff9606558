"""`vllm-patches check`, as a person runs it: green, and red where a page is wrong.

A plugin of vLLM's, in every process that an engine has, makes the CPU backend page by
kernel blocks of 32 tokens, as GPU ones do.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.engines import environment, models
from tests.e2e.conftest import MODELS
from tests.e2e.marks import Mark

TOOL = [sys.executable, "-c", "from vllm_patches.cli import app; app()", "check"]
FLAGS = ["--skip-tokenizer-init", "--enforce-eager", "--enable-prefix-caching"]
FLAGS += ["--max-model-len", "4096", "--num-gpu-blocks-override", "64"]
K8 = "from scripts.engines.engine import set_kernel_block_size as s; s(32)"
# A view of twice as many pages of half the bytes: dims that mislead a connector.
HALVED = """
from vllm.v1.worker import logical_blocks
view = logical_blocks.LogicalBlocks.view
def halved(self, dtype, shape, stride):
    if len(shape) > 2:
        shape = [2 * shape[0], *shape[1:]]
        dim = shape.index(self.slots_per_block)
        shape[dim] //= 2
        stride = [s // 2 if s == stride[0] else s for s in stride]
    return view(self, dtype, shape, stride)
logical_blocks.LogicalBlocks.view = halved
"""


@pytest.fixture
def check(tmp_path: Path):
    """Run the command; returns its process, and checks that it leaves nothing."""

    def run(*words: str, plugin: str = K8, **env: str) -> subprocess.CompletedProcess:
        mark = Mark()
        folder = make_plugin(tmp_path, plugin)
        path = os.pathsep.join([str(folder), str(environment.ROOT)])
        done = subprocess.run(
            [*TOOL, *words],
            env={**mark.env, **ENV, "PYTHONPATH": path, "TMPDIR": str(tmp_path), **env},
            capture_output=True,
            text=True,
            cwd=environment.ROOT,
            timeout=400,
        )
        assert not mark.running()
        if done.returncode == 0:
            assert not list(tmp_path.glob("vllm-patches-check-*"))
        return done

    return run


ENV: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # as scripts/engines/server.py has it
}


def make_plugin(folder: Path, code: str) -> Path:
    """A folder for the path, with a general plugin of vLLM's that runs the code."""
    folder = folder / "plugin"
    info = folder / "checked-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: checked\nVersion: 1\n")
    entry = "[vllm.general_plugins]\nchecked = checked_plugin:load\n"
    (info / "entry_points.txt").write_text(entry)
    body = "".join(f"    {line}\n" for line in code.strip().split("\n"))
    (folder / "checked_plugin.py").write_text(f"def load():\n{body}")
    return folder


def model(family: str) -> list[str]:
    block_size = models.FAMILIES[family].block_size
    path = models.make(family, MODELS)
    return [str(path), *FLAGS, "--block-size", str(block_size)]


def read(done: subprocess.CompletedProcess) -> dict[str, Any]:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_hybrid_on_kernel_blocks(check) -> None:
    done = check(*model("hybrid"), "--json")
    assert done.returncode == 0, done.stderr
    document = read(done)
    assert document["served"] == [768, 1024, 1280]
    assert document["difference"] == document["own_difference"] == 0.0
    assert document["loaded"]["bytes"] > 0 and document["stored"]["bytes"] > 0
    *states, attention = document["groups"]
    # Of each prompt the last state alone; every block of its attention.
    assert [g["compared"] for g in states] == [3 * g["layers"] for g in states]
    assert sum(g["layers"] for g in states) == 3
    assert attention["blocks_per_kv_block"] == 8
    assert attention["compared"] == 3 + 4 + 5
    assert all(g["wrong"] == g["unknown"] == 0 for g in document["groups"])


def test_a_broken_view_is_red(check) -> None:
    """And what an engine would answer from it is off."""
    done = check(*model("hybrid"), "--json", plugin=K8 + HALVED)
    assert done.returncode == 1, done.stderr
    assert "pages hold other bytes than stored" in done.stderr
    document = read(done)
    assert all(g["wrong"] for g in document["groups"])
    assert document["difference"] != 0.0


@pytest.mark.full
def test_stock_connector_on_kernel_blocks(check) -> None:
    """What users have today: a plain model, wrong pages, other answers."""
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.port": 1,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }
    flags = ["--kv-transfer-config", json.dumps(transfer), "--stock", "--json"]
    done = check(*model("plain"), *flags)
    assert done.returncode == 1, done.stderr
    document = read(done)
    assert document["connector"] == "StockConnector"
    assert min(document["served"]) >= 768, "served, without an error"
    assert document["groups"][0]["wrong"] > 0
    assert document["difference"] != 0.0


def test_flag_that_vllm_does_not_know(check) -> None:
    done = check(*model("plain"), "--no-such-flag")
    assert done.returncode == 2
    assert "error: unrecognized arguments: --no-such-flag" in done.stderr
    assert done.stdout == ""


def test_pages_of_many_geometries(check) -> None:
    done = check("--pages", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = read(done)
    assert len(document["geometries"]) >= 20


@pytest.mark.full
def test_pages_of_a_broken_view_are_red(check) -> None:
    done = check("--pages", "--json", plugin=HALVED)
    assert done.returncode == 1, done.stderr
    wrong = {g["name"] for g in read(done)["geometries"] if g["groups"][0]["wrong"]}
    assert "sub-paged" in wrong


@pytest.mark.full
@pytest.mark.parametrize("family", ["plain", "gpt-oss"])
def test_other_models(check, family: str) -> None:
    done = check(*model(family))
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_two_workers(check) -> None:
    env = {"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
    words = [*model("plain"), "--tensor-parallel-size", "2", "--json"]
    done = check(*words, **env)
    assert done.returncode == 0, done.stderr
    (group,) = read(done)["groups"]
    assert group["compared"] == 2 * group["layers"] * (3 + 4 + 5)
