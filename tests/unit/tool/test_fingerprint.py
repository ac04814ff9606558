"""What `vllm-patches fingerprint` says of two engines' logs."""

import json
from pathlib import Path

from typer.testing import CliRunner

from vllm_patches.cli import app

FULL = {
    "kind": "FullAttentionSpec",
    "block_size": 256,
    "kernel_block_size": 32,
    "backend": "CPU_ATTN",
}
MAMBA = {"kind": "MambaSpec", "block_size": 256, "states": [[[3, 4], "torch.float32"]]}


def log(folder: Path, name: str, digit: str, groups, contract: int = 1) -> str:
    document = json.dumps({"contract": contract, "groups": groups})
    path = folder / name
    path.write_text(
        "INFO something else\n"
        f"[12:00] LMCache INFO: KV cache fingerprint {digit * 64} {document} (x.py:1)\n"
    )
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(app, ["fingerprint", *arguments])


def test_difference_is_named_field_by_field(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", "a", [[MAMBA], [FULL]])
    b = log(tmp_path, "b.log", "b", [[MAMBA], [{**FULL, "kernel_block_size": 64}]])
    done = run(a, b)
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "group 1, FullAttentionSpec: kernel block size 32 here, 64 there"
    ]
    document = json.loads(run(a, b, "--json").stdout)
    assert document["here"] == "a" * 64 and document["there"] == "b" * 64


def test_group_that_one_engine_lacks(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", "a", [[FULL]])
    b = log(tmp_path, "b.log", "b", [[FULL], [MAMBA]])
    lines = run(a, b).stdout.splitlines()
    assert "group 1, MambaSpec: block size none here, 256 there" in lines


def test_same_fingerprint(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", "a", [[FULL]])
    done = run(a, a)
    assert done.exit_code == 0 and done.stdout == f"the same: {'a' * 64}\n"


def test_another_contract_version(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", "a", [[FULL]])
    b = log(tmp_path, "b.log", "b", [[FULL]], contract=2)
    done = run(a, b)
    assert done.exit_code == 1 and "contract version 1 here, 2 there" in done.stderr


def test_files_without_a_fingerprint(tmp_path: Path) -> None:
    a = log(tmp_path, "a.log", "a", [[FULL]])
    (tmp_path / "empty.log").write_text("nothing\n")
    (tmp_path / "cut.log").write_text(f'KV cache fingerprint {"a" * 64} {{"x": }}\n')
    for name in ("empty.log", "cut.log", "missing.log"):
        done = run(a, str(tmp_path / name))
        assert done.exit_code == 1
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
