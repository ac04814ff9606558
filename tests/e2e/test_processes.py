"""The fingerprint reaches the scheduler wherever vLLM runs its parts."""

from pathlib import Path

import pytest

from scripts.engines import roundtrip, server

PROMPTS = roundtrip.prompts((600,))

SEPARATE_CORE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
TWO_WORKERS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_SIM_MULTI_NUMA": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "auto",  # One thread a worker, a core each.
}


@pytest.mark.parametrize(
    "env, tensor_parallel_size",
    [(SEPARATE_CORE, 1), (TWO_WORKERS, 2)],
    ids=["separate engine core", "two workers"],
)
def test_exact_across_processes(
    plain, make_job, tmp_path: Path, env: dict[str, str], tensor_parallel_size: int
) -> None:
    common = dict(
        env=env,
        max_tokens=2,
        engine_args={"tensor_parallel_size": tensor_parallel_size},
    )
    # Workers that wait for each other keep both cores busy: let heartbeats be late.
    options = ("--separate-object-groups", "--worker-reap-timeout-seconds", "600")
    with server.running(tmp_path / "server.log", options) as lmcache:
        transfer = lmcache.connector(
            "LMCacheLogicalConnector", **{"lmcache.mp.heartbeat_interval": 120}
        )
        engines = roundtrip.run_engines(
            [
                make_job("A", plain, PROMPTS, kv_transfer_config=transfer, **common),
                make_job("B", plain, PROMPTS, kv_transfer_config=transfer, **common),
                make_job("reference", plain, PROMPTS, passes=2, **common),
            ],
            tmp_path,
        )
    rows = roundtrip.compare(PROMPTS, *engines)
    assert all(row.exact for row in rows), rows
