"""A connector that has a handshake and nothing else, as NIXL's has one."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
)


@dataclass
class Greeting(KVConnectorHandshakeMetadata):
    words: str = "hello"


class HandshakeConnector(ExampleConnector):
    def get_handshake_metadata(self) -> Any:
        return Greeting()
