"""What vLLM 0.33 calls as it sleeps and wakes up, on a real LMCache server.

Its worker calls ``unregister_kv_caches`` and ``restore_kv_caches``, its engine hands
over the handshake metadata once more. No engine of 0.33 runs on a CPU.
"""

from pathlib import Path

import torch

from tests.e2e.connectors import (
    BLOCK,
    CHUNK,
    CHUNKS,
    load,
    request,
    running,
    settle,
    store,
)

STORED, LOADED = 1, 31
BLOCKS = CHUNK * CHUNKS // BLOCK


def test_hits_are_exact_after_a_wake_up(tmp_path: Path) -> None:
    with running(tmp_path) as connectors:
        scheduler, worker, caches = connectors
        adapter, layers = worker.worker_adapter, caches.blocks.values()
        for blocks in layers:
            blocks.pages.random_(1, 255)
        written = [blocks.pages[STORED : STORED + BLOCKS].clone() for blocks in layers]
        store(connectors, request(), STORED)
        settle(connectors)

        worker.unregister_kv_caches()
        assert not adapter._health_event.wait(3), "asleep, whatever the heartbeat finds"
        for blocks in layers:
            blocks.pages.zero_()
        assert load(connectors, request(), LOADED) == 0
        assert all(not blocks.pages.any() for blocks in layers)

        worker.restore_kv_caches()
        assert adapter._health_event.wait(20), "registered anew"
        name = scheduler.scheduler_adapter.model_name
        scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
        assert scheduler.scheduler_adapter.model_name == name

        assert load(connectors, request(), LOADED) == CHUNK * CHUNKS
        for blocks, before in zip(layers, written):
            assert torch.equal(blocks.pages[LOADED : LOADED + BLOCKS], before)
