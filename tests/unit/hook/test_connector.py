"""The connector's refusals, and the memory it shares with LMCache on the CPU."""

import subprocess
import sys

import pytest
import torch

from lmcache_hook import cpu_memory
from lmcache_hook.connector import LMCacheLogicalConnector


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
    connector = object.__new__(LMCacheLogicalConnector)
    with pytest.raises(RuntimeError, match="vllm-patches apply"):
        connector.register_kv_caches({})


def test_no_lookup_before_the_fingerprint_is_known() -> None:
    connector = object.__new__(LMCacheLogicalConnector)
    connector.fingerprint = None
    with pytest.raises(RuntimeError, match="never told the workers' fingerprint"):
        connector._get_or_create_request_tracker(None)


def test_vllm_finds_the_connector_by_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    found = KVConnectorFactory.get_connector_class_by_name("LMCacheLogicalConnector")
    assert found is LMCacheLogicalConnector


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
