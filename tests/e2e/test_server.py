"""What an LMCache server serves to a model whose groups it keeps apart, or need not."""

from pathlib import Path

from scripts.engines import roundtrip, server

LONG = roundtrip.prompts((2100,))[0]


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


def _cold() -> dict[str, object]:
    return {"cached_tokens": 0, "token_ids": [], "logprobs": []}
