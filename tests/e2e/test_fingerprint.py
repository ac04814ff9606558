"""Engines that page differently never see each other's entries; equal ones share."""

import os
from pathlib import Path

from scripts.engines import roundtrip, server
from tests.e2e.conftest import settled

PROMPTS = roundtrip.prompts((1300, 1550))


def matrix_jobs(make_job, hybrid, transfer, ks):
    return [
        make_job(
            f"k{k}-{turn}",
            hybrid,
            PROMPTS,
            kernel_block_size=k,
            kv_transfer_config=transfer,
        )
        for k in ks
        for turn in ("stores", "retrieves")
    ]


def cached(engine) -> list[int]:
    return [answer["cached_tokens"] for answer in engine["answers"]]


def test_matrix_on_one_server(hybrid, make_job, tmp_path: Path) -> None:
    """One server, never emptied: hits within a geometry, none across."""
    ks = (32, 128, 256)
    with server.running(tmp_path / "server.log") as lmcache:
        transfer = lmcache.connector("LMCacheLogicalConnector")
        jobs = matrix_jobs(make_job, hybrid, transfer, ks) + [
            make_job(f"k{k}-reference", hybrid, PROMPTS, kernel_block_size=k, passes=2)
            for k in ks
        ]
        engines = roundtrip.run_engines(jobs, tmp_path)
    for i, k in enumerate(ks):
        first, second = engines[2 * i : 2 * i + 2]
        reference = engines[2 * len(ks) + i]
        assert cached(first) == [0, 0], f"kernel block {k} saw another geometry's entry"
        rows = roundtrip.compare(PROMPTS, first, second, reference)
        assert all(row.exact for row in rows), (k, rows)


def test_without_the_fingerprint_the_matrix_is_red(
    hybrid, make_job, tmp_path: Path
) -> None:
    """The same with the fingerprint switched off by hand: wrong hits, no error."""
    (tmp_path / "sitecustomize.py").write_text(
        "import lmcache_hook.namespace\n"
        "lmcache_hook.namespace.name = lambda model_name, *_: model_name\n"
    )
    with server.running(tmp_path / "server.log") as lmcache:
        transfer = lmcache.connector("LMCacheLogicalConnector")
        jobs = [
            make_job(
                f"k{k}",
                hybrid,
                PROMPTS,
                kernel_block_size=k,
                kv_transfer_config=transfer,
            )
            for k in (32, 256)
        ] + [make_job("reference", hybrid, PROMPTS, kernel_block_size=256, passes=2)]
        # Python imports a sitecustomize that it finds on its path at start.
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        engines = roundtrip.run_engines(jobs, tmp_path, env={"PYTHONPATH": path})
    assert all(tokens >= roundtrip.BLOCK_SIZE for tokens in cached(engines[1]))
    rows = roundtrip.compare(PROMPTS, *engines)
    assert max(row.difference for row in rows) > 0


def test_pools_of_any_size_and_a_restarted_server_share(
    hybrid, make_job, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    tier = ("--l2-adapter", f'{{"type": "fs", "base_path": "{disk}"}}')
    options = ("--separate-object-groups", *tier)

    def run(name: str, log: str, pool_gib: int):
        with server.running(tmp_path / log, options) as lmcache:
            job = make_job(
                name,
                hybrid,
                PROMPTS,
                kv_transfer_config=lmcache.connector("LMCacheLogicalConnector"),
                engine_args={"num_gpu_blocks_override": None},
                env={"VLLM_CPU_KVCACHE_SPACE": str(pool_gib)},
            )
            (engine,) = roundtrip.run_engines([job], tmp_path)
            settled(disk)
        return engine

    first = run("first", "server-1.log", pool_gib=1)
    kept = {path.name for path in disk.rglob("*.data")}
    second = run("second", "server-2.log", pool_gib=2)
    assert {path.name for path in disk.rglob("*.data")} == kept, "samples pile up"
    (reference,) = roundtrip.run_engines(
        [make_job("reference", hybrid, PROMPTS, passes=2)], tmp_path
    )
    rows = roundtrip.compare(PROMPTS, first, second, reference)
    assert all(row.exact for row in rows), rows
