"""A second engine answers from the first one's cache, bit for bit."""

import re
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pytest

from scripts.engines import environment, roundtrip, server
from tests.e2e.marks import Mark
from vllm_patches import fingerprint

MODELS = ("hybrid", "plain")
FINGERPRINTS: dict[roundtrip.Case, set[str]] = defaultdict(set)
"""What the engines logged, whatever their runner."""


@pytest.fixture(
    scope="module",
    params=[
        ("v1", 32),
        ("v1", 256),
        ("v2", 32),
        pytest.param(("v2", 256), marks=pytest.mark.full),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def trips(request, tmp_path_factory) -> dict[roundtrip.Case, roundtrip.RoundTrip]:
    """The round trips of one model runner and kernel block size."""
    runner, kernel_block_size = request.param
    folder = tmp_path_factory.mktemp(f"roundtrip-{runner}-{kernel_block_size}")
    cases = [roundtrip.Case(model, kernel_block_size) for model in MODELS]
    trips = roundtrip.run(folder, cases, runner)
    for case in cases:
        digest = fingerprint.read(folder / f"{case.name}-A.log").digest
        FINGERPRINTS[case].add(digest)
    return trips


@pytest.mark.parametrize("model", MODELS)
def test_exact(trips, model: str) -> None:
    ((case, trip),) = ((c, t) for c, t in trips.items() if c.model == model)
    assert [row.difference for row in trip.rows] == [0.0] * len(trip.rows)
    assert trip.exact, trip.rows
    attention = [g for g in trip.groups if g["kind"] == "FullAttentionSpec"]
    assert [g["kernel_block_size"] for g in attention] == [case.kernel_block_size]
    assert all(g["view"][0] == 256 for g in trip.groups), "one view page a block id"


def test_both_runners_share_a_namespace(trips) -> None:
    """And no two models or kernel block sizes do."""
    assert all(len(digests) == 1 for digests in FINGERPRINTS.values()), FINGERPRINTS
    assert len(set.union(*FINGERPRINTS.values())) == len(FINGERPRINTS)


def test_stock_connector_is_silently_wrong(plain, make_job, tmp_path: Path) -> None:
    """What this project ends: hits on sub-paged attention, wrong and without error."""
    prompt_ids = roundtrip.prompts()
    with server.running(tmp_path / "server.log") as lmcache:
        transfer = lmcache.connector(
            "LMCacheMPConnector", **{"lmcache.mp.mp_transfer_mode": "lmcache_driven"}
        )
        jobs = [
            make_job("A", plain, prompt_ids, kv_transfer_config=transfer),
            make_job("B", plain, prompt_ids, kv_transfer_config=transfer),
            make_job("reference", plain, prompt_ids, passes=2),
        ]
        rows = roundtrip.compare(prompt_ids, *roundtrip.run_engines(jobs, tmp_path))
    assert all(row.cached >= roundtrip.BLOCK_SIZE for row in rows)
    assert not any(row.same_tokens for row in rows)
    assert not any(row.exact for row in rows)


def test_script_prints_the_tables_and_leaves_nothing_behind(tmp_path: Path) -> None:
    mark, out, err = Mark(), tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [environment.ROOT / "scripts" / "roundtrip", "--model", "plain"],
            stdout=stdout,
            stderr=stderr,
            env=mark.env,
        )
        had_shared_memory = False
        while process.poll() is None:
            mark.running()
            had_shared_memory |= bool(mark.shared_memory())
            time.sleep(0.1)
    assert process.returncode == 0, out.read_text() + err.read_text()
    assert out.read_text().count("0.0 │") == 3
    assert "every difference is 0.0" in out.read_text()
    assert re.search(r"engine plain-32-0-B", err.read_text()), "progress is visible"
    assert had_shared_memory
    assert not mark.shared_memory()
    assert not mark.running()


def test_interrupted_script_leaves_nothing_behind() -> None:
    mark = Mark()
    process = subprocess.Popen(
        [environment.ROOT / "scripts" / "roundtrip"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=mark.env,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "-B" in line:
            break
    deadline = time.monotonic() + 120
    while not mark.shared_memory() and time.monotonic() < deadline:
        mark.running()
        time.sleep(0.1)
    assert mark.shared_memory(), "the second engine is at work"
    process.terminate()
    assert process.wait(timeout=60) == 143
    process.stderr.close()
    assert not mark.shared_memory()
    assert not mark.running()


def test_failing_engine_is_named_with_its_log(plain, make_job, tmp_path: Path) -> None:
    job = make_job("broken", plain, [[1, 2]], engine_args={"max_model_len": 10**9})
    with pytest.raises(server.StepFailed, match=r"engine broken failed.*broken\.log"):
        roundtrip.run_engines([job], tmp_path)


def test_kernel_block_size_that_does_not_divide_is_refused() -> None:
    done = subprocess.run(
        [environment.ROOT / "scripts" / "roundtrip", "--kernel-block-size", "7"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.replace("\n", " ").startswith("error: --kernel-block-size 7")
