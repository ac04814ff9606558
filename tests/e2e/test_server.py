"""The LMCache server must keep KV cache groups apart, or the engine does not start."""

import re
from pathlib import Path

import psutil
import pytest

from scripts.engines import roundtrip, server

LONG = roundtrip.prompts((2100,))[0]


def test_server_that_mixes_groups_is_refused(hybrid, make_job, tmp_path: Path) -> None:
    with server.running(tmp_path / "server.log", options=()) as lmcache:
        job = make_job(
            "refused",
            hybrid,
            [LONG[:600]],
            kv_transfer_config=lmcache.connector("LMCacheLogicalConnector"),
        )
        with pytest.raises(server.StepFailed):
            roundtrip.run_engines([job], tmp_path)
    log = Path(job.log).read_text()
    assert "lmcache server --separate-object-groups" in log
    assert re.search(r"ValueError: The LMCache server at tcp://\S+ does not keep", log)
    assert "answered prompt" not in log


def test_model_without_mamba_layers_needs_no_separate_groups(
    plain, make_job, tmp_path: Path
) -> None:
    with server.running(tmp_path / "server.log", options=()) as lmcache:
        job = make_job(
            "plain",
            plain,
            [LONG[:600]],
            kv_transfer_config=lmcache.connector("LMCacheLogicalConnector"),
        )
        roundtrip.run_engines([job], tmp_path)


def test_states_inside_a_step_are_never_served(
    hybrid, make_job, tmp_path: Path
) -> None:
    """A prompt stored in one step leaves a state at its end only."""
    short = [LONG[:600], LONG[:1300]]
    engine_args = {"max_num_batched_tokens": 4096}
    with server.running(tmp_path / "server.log") as lmcache:
        transfer = lmcache.connector("LMCacheLogicalConnector")
        stores, retrieves, reference = roundtrip.run_engines(
            [
                make_job(
                    "stores",
                    hybrid,
                    [LONG],
                    kv_transfer_config=transfer,
                    engine_args=engine_args,
                ),
                make_job(
                    "retrieves",
                    hybrid,
                    short,
                    kv_transfer_config=transfer,
                    engine_args=engine_args,
                ),
                make_job("reference", hybrid, short, engine_args=engine_args),
            ],
            tmp_path,
        )
    rows = roundtrip.compare(short, reference, retrieves, reference)
    assert [row.cached for row in rows] == [row.reference_cached for row in rows]
    assert [row.difference for row in rows] == [0.0, 0.0]


def test_mixed_hit_is_exact(hybrid, make_job, tmp_path: Path) -> None:
    """Prefix in vLLM's own prefix cache, tail in LMCache."""
    (whole,) = roundtrip.prompts((1550,), seed=3)
    head = whole[:1030]
    with server.running(tmp_path / "server.log") as lmcache:
        transfer = lmcache.connector("LMCacheLogicalConnector")
        _, mixed, reference = roundtrip.run_engines(
            [
                make_job("stores", hybrid, [whole], kv_transfer_config=transfer),
                # The head is taken from LMCache into the engine's own cache first.
                make_job("mixed", hybrid, [head, whole], kv_transfer_config=transfer),
                make_job("reference", hybrid, [whole], passes=2),
            ],
            tmp_path,
        )
    answers = {"answers": mixed["answers"][1:]}
    (row,) = roundtrip.compare([whole], {"answers": [_cold()]}, answers, reference)
    assert row.exact, row


def test_autostarted_server_keeps_groups_apart(
    hybrid, make_job, tmp_path: Path
) -> None:
    port, http_port = server.free_ports(2)
    transfer = {
        "kv_connector": "LMCacheLogicalConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.autostart": True,
            "lmcache.mp.autostart.server_args": (
                f"--http-port {http_port} --l1-size-gb 1 --eviction-policy LRU"
            ),
        },
    }
    job = make_job("autostart", hybrid, [LONG[:600]], kv_transfer_config=transfer)
    (engine,) = roundtrip.run_engines([job], tmp_path)
    assert len(engine["answers"]) == 1, "the engine's check at start-up was passed"
    commands = [p.info["cmdline"] or () for p in psutil.process_iter(["cmdline"])]
    assert not any(str(port) in command for command in commands), "it ends with us"


def _cold() -> dict[str, object]:
    return {"cached_tokens": 0, "token_ids": [], "logprobs": []}
