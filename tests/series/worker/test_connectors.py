"""How the release's connectors get the logical KV caches."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.worker.logical_blocks import LogicalKVCaches

from tests.series.worker import pool


class Child:
    """A connector that keeps what it is given."""

    def __init__(self) -> None:
        self.raw: Any = None
        self.logical: Any = None

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self.raw = kv_caches

    def register_logical_kv_caches(self, kv_caches: LogicalKVCaches) -> None:
        self.logical = kv_caches


class Unaware(Child):
    """One that knows the raw caches only."""

    register_logical_kv_caches: Any = KVConnectorBase_V1.register_logical_kv_caches


class Overriding(MultiConnector):
    """Has a part of its own in the registration."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.called_with = kv_caches
        super().register_kv_caches(kv_caches)


class Changing(MultiConnector):
    """Hands its children other tensors."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(dict(kv_caches))


@pytest.fixture
def caches() -> LogicalKVCaches:
    bound = pool.make(32)
    return bound.block_table.logical_kv_caches(bound.config, bound.kv_caches, "HND")


def multi(kind: type, *children: Child) -> Any:
    connector = object.__new__(kind)
    connector._connectors = list(children)
    connector._logical_kv_caches = None
    return connector


@pytest.mark.parametrize("kind", [MultiConnector, Overriding])
def test_every_child_gets_what_it_asks_for(kind: type, caches: LogicalKVCaches) -> None:
    aware, unaware = Child(), Unaware()
    connector = multi(kind, aware, unaware)
    connector.register_logical_kv_caches(caches)
    assert aware.logical is caches and aware.raw is None
    assert unaware.raw is caches.raw
    if kind is Overriding:
        assert connector.called_with is caches.raw


def test_other_tensors_are_never_taken_for_the_views(caches: LogicalKVCaches) -> None:
    child = Child()
    multi(Changing, child).register_logical_kv_caches(caches)
    assert child.logical is None and child.raw == caches.raw


def test_a_connector_that_asks_for_nothing_computes_nothing(
    caches: LogicalKVCaches,
) -> None:
    child = Unaware()
    child.register_logical_kv_caches(caches)
    assert child.raw is caches.raw
    assert not {"_layers", "_paged", "document"} & vars(caches).keys()
