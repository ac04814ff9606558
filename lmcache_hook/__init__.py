"""The LMCache connector that registers vLLM's logical-block views as they are."""

NAME = "LMCacheLogicalConnector"


def register() -> None:
    """Make the connector known to vLLM by name (a ``vllm.general_plugins`` entry)."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, f"{__name__}.connector", NAME)
