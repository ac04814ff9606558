"""A reused block never shows its last owner's bytes (CPU runner, k = 8)."""

import math
import shutil
from pathlib import Path

import pytest

from scripts.engines import roundtrip
from scripts.series.wheels import unpack_python

# More tokens than the pool of 24 blocks keeps, so that blocks change hands between the
# Mamba and the attention groups, float32 states read as keys and values in bfloat16.
PROMPTS = roundtrip.prompts([700 + 110 * i for i in range(6)])
ROUNDS = 4


def run(hybrid: str, make_job, tmp_path: Path, **env: str) -> tuple[int, int]:
    """Returns how many answers have NaN, and how many differ from the first round's."""
    job = make_job(
        "small-pool",
        hybrid,
        PROMPTS,
        passes=ROUNDS,
        max_tokens=40,
        engine_args={
            "num_gpu_blocks_override": 24,
            "mamba_ssm_cache_dtype": "float32",
        },
    )
    (engine,) = roundtrip.run_engines([job], tmp_path, env=env)
    answers = [
        (i, answer) for round_ in engine["rounds"] for i, answer in enumerate(round_)
    ]
    assert len(answers) == ROUNDS * len(PROMPTS)
    first = engine["rounds"][0]
    nan = sum(any(map(math.isnan, a["logprobs"])) for _, a in answers)
    differing = sum(a["token_ids"] != first[i]["token_ids"] for i, a in answers)
    return nan, differing


def test_small_pool_is_exact(hybrid, make_job, tmp_path: Path) -> None:
    assert run(hybrid, make_job, tmp_path) == (0, 0)


def test_small_pool_shows_nan_without_the_zeroing_patch(
    hybrid, make_job, tmp_path: Path
) -> None:
    """Runs the patched vLLM with the one file as its release shipped it."""
    import vllm

    file = Path("vllm/v1/worker/cpu_model_runner.py")
    tree = tmp_path / "tree"
    installed = Path(vllm.__file__).parent
    shutil.copytree(
        installed,
        tree / "vllm",
        copy_function=lambda source, target: Path(target).symlink_to(source),
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (tree / file).unlink()
    shutil.copy(unpack_python(vllm.__version__.partition("+")[0]) / file, tree / file)
    nan, _ = run(hybrid, make_job, tmp_path, PYTHONPATH=str(tree))
    assert nan > 0


@pytest.mark.parametrize("bad", [float("nan")])
def test_a_nan_is_never_exact(bad: float) -> None:
    row = roundtrip.Row(1300, 0, 1280, 1280, [], True, bad)
    assert not row.exact
    assert math.isnan(roundtrip._largest_difference([0.0, bad, 1.0], [0.0, 0.0, 0.0]))
