"""The connector's refusals and defaults, and the memory it shares with LMCache."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from lmcache_hook import connector, cpu_memory, request_key
from lmcache_hook.connector import LMCacheLogicalConnector, WorkerMetadata
from tests.unit.hook import engines


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return engines.configure(engines.save_config(tmp_path))


def test_unpatched_vllm_is_refused_with_the_command() -> None:
    """In a process of its own, where the base class lacks the patch's method."""
    code = (
        "from vllm.distributed.kv_transfer.kv_connector.v1.base import *\n"
        "del KVConnectorBase_V1.register_logical_kv_caches\n"
        "from lmcache_hook.connector import LMCacheLogicalConnector\n"
        "LMCacheLogicalConnector(None, KVConnectorRole.WORKER, None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(
        "RuntimeError: LMCacheLogicalConnector needs a vLLM that hands over "
        "logical-block views: run `vllm-patches apply` in this environment."
    )


def test_kernel_paged_tensors_are_refused() -> None:
    refusing = object.__new__(LMCacheLogicalConnector)
    with pytest.raises(RuntimeError, match="vllm-patches apply"):
        refusing.register_kv_caches({})


def test_vllm_finds_the_connector_by_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    found = KVConnectorFactory.get_connector_class_by_name("LMCacheLogicalConnector")
    assert found is LMCacheLogicalConnector


def refusal(config: Any) -> str:
    with pytest.raises(ValueError) as refused:
        connector.refuse(config)
    return str(refused.value)


def test_backends_that_cannot_read_a_cached_prefix(config: Any) -> None:
    """vLLM turns both off for them (vllm/platforms/cpu.py); a person, one of them."""
    connector.refuse(config)
    config.cache_config.enable_prefix_caching = False
    connector.refuse(config)
    config.scheduler_config.enable_chunked_prefill = False
    assert "cannot read a cached prefix" in refusal(config)


def test_ranks_that_schedule_by_themselves(config: Any) -> None:
    config.parallel_config.distributed_executor_backend = "external_launcher"
    connector.refuse(config)
    config.parallel_config.world_size = 2
    assert "Use the mp executor" in refusal(config)


def test_sleep_that_connectors_are_not_told_of(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.model_config.enable_sleep_mode = True
    if not hasattr(KVConnectorBase_V1, "restore_kv_caches"):
        assert "--enable-sleep-mode" in refusal(config)
        monkeypatch.setattr(
            KVConnectorBase_V1,
            "restore_kv_caches",
            lambda self: None,
            raising=False,
        )
    connector.refuse(config)


def test_options_that_do_nothing_here(config: Any) -> None:
    transfer = config.kv_transfer_config
    option = "lmcache.mp.transfer_intermediate_tensors"
    transfer.kv_connector_extra_config[option] = True
    assert f"{option} does nothing" in refusal(config)


def configured(config: Any, **extra: Any) -> dict[str, Any]:
    transfer = config.kv_transfer_config
    given = {f"lmcache.mp.{name.replace('__', '.')}": v for name, v in extra.items()}
    transfer.kv_connector_extra_config = given
    before = dict(given)
    connector._configure(transfer, 544)
    assert given == before, "the operator's own is not edited"
    return transfer.kv_connector_extra_config


def test_defaults(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_MP_TRANSFER_MODE", raising=False)
    assert configured(config)["lmcache.mp.mp_transfer_mode"] == "lmcache_driven"
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    own = configured(config, mp_transfer_mode="engine_driven", mq_timeout=7)
    assert own["lmcache.mp.mp_transfer_mode"] == "engine_driven"
    assert own["lmcache.mp.mq_timeout"] == 7
    monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", "engine_driven")
    assert "lmcache.mp.mp_transfer_mode" not in configured(config)


def test_autostarted_server(config: Any) -> None:
    args = "lmcache.mp.autostart.server_args"
    assert args not in configured(config)
    said = configured(config, autostart=True)[args]
    assert said.split() == ["--separate-object-groups", "--chunk-size", "544"]
    own = configured(config, autostart=True, autostart__server_args="--chunk-size 1088")
    assert own[args] == "--chunk-size 1088 --separate-object-groups"


def test_one_unhealthy_worker_is_told_of() -> None:
    well, ill = WorkerMetadata({}), WorkerMetadata({"a": 1}, is_healthy=False)
    assert well.aggregate(well).is_healthy
    for both in (well.aggregate(ill), ill.aggregate(well)):
        assert not both.is_healthy
        assert both.completed_store_requests == {"a": 1}


def test_an_unhealthy_worker_stops_the_lookups() -> None:
    scheduler = object.__new__(LMCacheLogicalConnector)
    scheduler.lazy_offload = False
    event = threading.Event()
    scheduler.scheduler_adapter = SimpleNamespace(_health_events={"url": event})
    for is_healthy in (True, False):
        event.set()
        output: Any = SimpleNamespace(
            kv_cache_events=None,
            kv_connector_worker_meta=WorkerMetadata({}, is_healthy=is_healthy),
        )
        scheduler.update_connector_output(output)
        assert event.is_set() == is_healthy


@pytest.mark.parametrize("cache_salt", [None, "", "tenant-7", "a" * 32])
def test_salts_that_lmcache_takes(cache_salt: str | None) -> None:
    assert request_key.salt(cache_salt) == (cache_salt or "")


@pytest.mark.parametrize("cache_salt", ["a" * 33, "a/b", "a@b", "a\\b", "a\0b", "\n/"])
def test_salts_that_it_does_not(cache_salt: str) -> None:
    said = request_key.salt(cache_salt)
    assert len(said) == 32 and bytes.fromhex(said)
    assert said != request_key.salt(cache_salt + "x")


def test_zeros_in_the_pool_are_lmcaches_shared_memory() -> None:
    from lmcache.v1.platform.devices.cpu.shm import (
        _CPU_SHM_SEGMENTS,
        migrate_to_shm_and_wrap,
    )

    with cpu_memory.SharedMemoryPool():
        shared = torch.zeros(4096, dtype=torch.int8)
        other = torch.zeros(4, dtype=torch.float32)
    address = shared.data_ptr()
    view = shared.view(4, 1024)
    wrapped = migrate_to_shm_and_wrap(view)
    assert view.data_ptr() == address, "nothing is left to move"
    view.fill_(7)
    assert wrapped.to_tensor().eq(7).all(), "the server sees what the model writes"
    segments = {segment() for _, segment, *_ in _CPU_SHM_SEGMENTS.values()}
    assert shared.untyped_storage() in segments
    assert other.untyped_storage() not in segments
