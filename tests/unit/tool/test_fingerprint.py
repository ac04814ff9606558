"""What `vllm-patches fingerprint` says of two engines' logs."""

import hashlib
import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from vllm_patches.cli import app

FULL = {
    "kind": "FullAttentionSpec",
    "block_size": 256,
    "kernel_block_size": 32,
    "bound": [["torch.bfloat16", [2, 1]]],
    "backend": "CPU_ATTN+vec",
}
FP8 = FULL | {"bound": [["torch.uint8", [2, 1]]], "quantization": "FP8_PER_TENSOR"}
MAMBA = {"kind": "MambaSpec", "block_size": 256, "states": [[[3, 4], "torch.float32"]]}
MODEL = {
    "config": {"rope_parameters": {"rope_theta": 10000.0}, "hidden_size": 128},
    "dtype": "torch.bfloat16",
    "kv cache dtype": "auto",
}
PARALLEL = {"tensor": 1, "pipeline": 1, "decode context": 1, "interleave": 1}


def rank(*layers: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    """A rank's pages: group and format of every layer."""
    formats: list[Any] = []
    for _, page_format in layers:
        if page_format not in formats:
            formats.append(page_format)
    return {
        "formats": formats,
        "layers": [[group, formats.index(f)] for group, f in layers],
    }


def log(folder: Path, name: str, *ranks: dict[str, Any], **changes: Any) -> str:
    document = {
        "contract": 2,
        "model": MODEL,
        "parallel": PARALLEL,
        "ranks": [*range(len(ranks))],
        "pages": [*ranks],
    } | changes
    text = json.dumps(document)
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = folder / name
    path.write_text(
        "INFO something else\n"
        f"[12:00] LMCache INFO: KV cache fingerprint {digest} {text} (x.py:1)\n"
    )
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(app, ["fingerprint", *arguments])


def told(a: str, b: str) -> list[str]:
    done = run(a, b)
    assert done.exit_code == 1
    assert json.loads(run(a, b, "--json").stdout)["differences"]
    return done.stdout.splitlines()


def test_another_kernel_block_size(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", rank((0, MAMBA), (1, FULL), (1, FULL)))
    other = FULL | {"kernel_block_size": 64}
    b = log(tmp_path, "b.log", rank((0, MAMBA), (1, other), (1, other)))
    (line,) = told(a, b)
    assert line.startswith("rank 0, layers 1-2 of 3 (FullAttentionSpec): ")
    assert line.endswith(": kernel block size 32 here, 64 there")


def test_e1_which_layers_are_quantized(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", rank((0, FULL), (0, FP8), (0, FULL), (0, FP8)))
    b = log(tmp_path, "b.log", rank((0, FULL), (0, FULL), (0, FP8), (0, FP8)))
    (line,) = told(a, b)
    assert line.startswith("rank 0, layers 1-2 of 4 (FullAttentionSpec): bound ")
    assert "quantization FP8_PER_TENSOR here, none there" in line


def test_e2_e3_other_numbers_of_layers(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", *2 * [rank(*3 * [(0, FULL)])])
    b = log(tmp_path, "b.log", *2 * [rank(*4 * [(0, FULL)])])
    assert told(a, b) == ["ranks 0-1: 3 layers here, 4 there"]


def test_e4_e5_another_split(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", rank((0, FULL)), parallel=PARALLEL | {"pipeline": 2})
    b = log(tmp_path, "b.log", rank((0, FULL)), parallel=PARALLEL | {"interleave": 4})
    assert told(a, b) == [
        "parallel: pipeline 2 here, 1 there; interleave 1 here, 4 there"
    ]


def test_e6_e7_another_packing(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", rank((0, FULL)))
    b = log(tmp_path, "b.log", rank((0, FULL | {"backend": "CPU_ATTN+amx"})))
    (line,) = told(a, b)
    assert line.startswith("rank 0, layer 0 (FullAttentionSpec): ")
    assert line.endswith(": backend CPU_ATTN+vec here, CPU_ATTN+amx there")


def test_e8_another_model_at_one_path(tmp_path: Path) -> None:
    config = MODEL["config"] | {"rope_parameters": {"rope_theta": 5000.0}}  # type: ignore[operator]
    a = log(tmp_path, "a.log", rank((0, FULL)))
    b = log(tmp_path, "b.log", rank((0, FULL)), model=MODEL | {"config": config})
    assert told(a, b) == [
        "model: config.rope_parameters.rope_theta 10000.0 here, 5000.0 there"
    ]


def test_e9_another_state_layout(tmp_path: Path) -> None:
    other = MAMBA | {"states": [[[4, 3], "torch.float32"]]}
    a = log(tmp_path, "a.log", rank((0, MAMBA)))
    b = log(tmp_path, "b.log", rank((0, other)))
    (line,) = told(a, b)
    assert line.startswith("rank 0, layer 0 (MambaSpec): states ")


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", *2 * [rank((0, FULL))])
    b = log(tmp_path, "b.log", rank((0, FULL)))
    assert told(a, b) == ["ranks with pages of their own: 2 here, 1 there"]


def test_two_digests_are_never_the_same(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", rank((0, FULL)))
    b = log(tmp_path, "b.log", rank((0, FULL)), unknown="field")
    assert told(a, b) == ["the digests differ, and nothing in the logs says why"]


def test_same_fingerprint(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", rank((0, FULL)))
    done = run(a, a)
    assert done.exit_code == 0 and done.stdout.startswith("the same: ")


def test_another_contract_version(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", rank((0, FULL)))
    b = log(tmp_path, "b.log", rank((0, FULL)), contract=1)
    done = run(a, b)
    assert done.exit_code == 1 and "contract version 2 here, 1 there" in done.stderr


def test_files_without_a_fingerprint(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", rank((0, FULL)))
    (tmp_path / "empty.log").write_text("nothing\n")
    (tmp_path / "cut.log").write_text(f'KV cache fingerprint {"a" * 64} {{"x": }}\n')
    lost = json.dumps({"contract": 2, "ranks": [3], "pages": []})
    (tmp_path / "other.log").write_text(f"KV cache fingerprint {'a' * 64} {lost}\n")
    for name in ("empty.log", "cut.log", "other.log", "missing.log"):
        done = run(a, str(tmp_path / name))
        assert done.exit_code == 1
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
