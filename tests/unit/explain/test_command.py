"""`vllm-patches explain` as a person and as a machine use it, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner, Result
from vllm.platforms import current_platform  # Its log is not to be the runner's.

from scripts.engines import models
from vllm_patches.cli import app
from vllm_patches.explain import without_gpu

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return models.make_config("plain", tmp_path)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """Run explain, which must refuse in one line."""
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


def test_lines_and_json(plain: Path) -> None:
    options = ("--attention-backend", "FLASH_ATTN", "--block-size", 64)
    result = run(plain, *options)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "an engine's has its weights" in result.stdout
    (row,) = (line for line in result.stdout.splitlines() if "FullAttention" in line)
    assert row.split()[:5] == ["0", "FullAttentionSpec", "4", "64", "64"]
    assert "\nlmcache server --chunk-size 256 " in result.stdout
    assert f"\nvllm serve {plain} --enable-prefix-caching --block-size 64 " in (
        result.stdout
    )
    document = json.loads(run(plain / "config.json", *options, "--json").stdout)
    assert document["served"] is True
    assert document["groups"][0]["layers"] == [4]
    assert document["fingerprint"] in result.stdout


def test_picture_of_25_kernel_pages(tmp_path: Path) -> None:
    hybrid, file = models.make_config("hybrid", tmp_path), tmp_path / "pages.svg"
    options = ("--kernel-block-size", 64, "--block-size", 1600, "--svg", file)
    assert run(hybrid, *options).exit_code == 0
    root = ET.parse(file).getroot()
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert any("1,600 tokens = 25 kernel pages of 64 tokens" in text for text in texts)
    pages = {str(n) for n in range(25)}
    boxes = {
        title.text: box
        for box in root.iter(f"{SVG}rect")
        if (title := box.find(f"{SVG}title")) is not None
    }
    assert pages <= set(boxes)
    assert {"K: 128 bytes", "V: 128 bytes"} <= set(titles)
    xs = [float(boxes[str(n)].get("x", "")) for n in range(25)]
    widths = {boxes[str(n)].get("width") for n in range(25)}
    assert len(widths) == 1, "to scale"
    (width,) = map(float, map(str, widths))
    assert xs == pytest.approx([xs[0] + n * width for n in range(25)], abs=0.2)
    assert any("padding" in text for text in texts)


def test_refused_is_told_with_the_groups(tmp_path: Path) -> None:
    hybrid = models.make_config("hybrid", tmp_path)
    result = run(hybrid, "--pipeline-parallel-size", 2)
    assert result.exit_code == 1
    assert "MambaSpec" in result.stdout
    assert "refused: No layer on rank 0 of group" in result.stdout
    assert "lmcache server" not in result.stdout


def test_ranks_that_do_not_exist_are_asked_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in memory would be their answer, and a size of that taken for one."""
    asked: list[Any] = []
    monkeypatch.setattr(without_gpu, "_nobody_answers", lambda *a, **_: asked.append(a))
    hybrid = models.make_config("hybrid", tmp_path)
    for option in ("--pipeline-parallel-size", "--tensor-parallel-size"):
        run(hybrid, option, 2)
    assert not asked


def test_a_layout_that_splits_a_page(plain: Path) -> None:
    result = run(
        plain, "--attention-backend", "FLASH_ATTN", "--kv-cache-layout", "LHBNC"
    )
    assert result.exit_code == 1
    assert "LHBNC" in result.stdout + result.stderr


def test_a_backend_that_cannot_read_a_prefix(tmp_path: Path) -> None:
    """As the connector refuses it: vLLM turns prefix caching off for it on the CPU."""
    deepseek = models.make_config("deepseek", tmp_path)
    result = run(deepseek, "--attention-backend", "CPU_MLA")
    assert result.exit_code == 1
    assert "refused: vLLM has turned prefix caching" in result.stdout


def test_an_environment_without_the_patches(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.logical_blocks", None)
    assert "run `vllm-patches status`" in refused(plain)


def test_a_platform_whose_backend_must_be_given(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert refused(plain).startswith("give --attention-backend")


def test_a_picture_that_cannot_be_written(plain: Path) -> None:
    line = refused(plain, "--svg", plain / "nowhere/pages.svg")
    assert line.endswith("pages.svg cannot be written: No such file or directory")


def test_no_config(tmp_path: Path) -> None:
    assert "give a config.json" in refused(tmp_path / "nothing")
    assert "config.json cannot be read: No such file" in refused(tmp_path)
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\x00")
    assert "it is no text" in refused(tmp_path)
    file.write_text("{")
    assert "is no JSON" in refused(tmp_path)
    for text in ("[]", "{}", '{"architectures": []}'):
        file.write_text(text)
        assert "names no architectures" in refused(tmp_path)


def test_an_unknown_architecture(plain: Path) -> None:
    file = plain / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": ["NobodysForCausalLM"]}))
    assert "NobodysForCausalLM" in refused(plain)
    file.write_text(json.dumps(config | {"model_type": "nobodys"}))
    assert "nobodys" in refused(plain)


def test_no_kv_cache(tmp_path: Path) -> None:
    from transformers import BertConfig

    config = BertConfig(architectures=["BertModel"], num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    assert "no KV cache" in refused(tmp_path)


@pytest.mark.parametrize(
    "options, reason",
    [
        (("--attention-backend", "FLASH"), "FLASH is no attention backend"),
        (("--attention-backend", "FLASHINFER"), "give its --kernel-block-size"),
        (("--attention-backend", "FLASHMLA"), "no attention backend for this model"),
        (("--tensor-parallel-size", 3), "must be divisible by tensor parallel size"),
        (("--kernel-block-size", 48, "--block-size", 128), "block size"),
        (("--kv-cache-dtype", "int3"), "int3"),
        (("--kv-cache-layout", "XYZ"), "XYZ"),
        (("--decode-context-parallel-size", 2), "dcp_size=2"),
    ],
)
def test_options_that_contradict(plain: Path, options, reason: str) -> None:
    assert reason in refused(plain, *options)
