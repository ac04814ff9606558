"""A registration that a real server refuses ends in seconds, not in a time-out."""

import time
from pathlib import Path

import pytest
from lmcache.utils import EngineType

from tests.e2e.connectors import running


def test_a_refused_registration_ends_in_seconds(tmp_path: Path) -> None:
    with running(tmp_path) as connectors:
        client = connectors.worker.worker_adapter.req_client
        nothing = (1, [], "model", 1, EngineType.VLLM, {}, [])
        began = time.monotonic()
        with pytest.raises(ConnectionRefusedError, match="its log says why"):
            client.register_kv_cache(*nothing).result(timeout=300)
        assert time.monotonic() - began < 30
    assert "Error handling operation" in (tmp_path / "server.log").read_text()
