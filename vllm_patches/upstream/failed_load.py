"""One failed asynchronous KV load, and the next request ends the engine (vLLM 0.32.0).

    python failed_load.py MODEL [fail|recompute]

Under the default ``kv_load_failure_policy="fail"`` the scheduler finishes the request
with an error, and its connector asks to delay the free until the request's stores are
done, as LMCache's does. The same step's ``finished_recving`` frees the request all the
same; its ``finished_sending``, one step later, meets ``assert req_id in self.requests``
(vllm/v1/core/sched/scheduler.py, ``_update_from_kv_xfer_finished``). With "recompute"
both requests are answered.
"""

import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)


class Metadata(KVConnectorMetadata):
    def __init__(self, loads: dict[str, list[int]]) -> None:
        self.loads = loads


class FailingConnector(KVConnectorBase_V1):
    """Has the first block of the first prompt, and then fails to load it."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_size = vllm_config.cache_config.block_size
        self.seen: set[str] = set()
        self.loads: dict[str, list[int]] = {}
        self.failed: set[int] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        if self.seen:
            return 0, False
        self.seen.add(request.request_id)
        return self.block_size, True

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self.loads[request.request_id] = blocks.get_block_ids()[0][:1]

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        loads, self.loads = self.loads, {}
        return Metadata(loads)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._get_connector_metadata()
        self.loads |= metadata.loads

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return True, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        loads, self.loads = self.loads, {}
        self.failed = {block for blocks in loads.values() for block in blocks}
        return finished_req_ids, set(loads)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


def main(model: str, policy: str = "fail") -> None:
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        kv_transfer_config={
            "kv_connector": "FailingConnector",
            "kv_connector_module_path": "failed_load",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
        },
    )
    sampling = SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True)
    for first in (1, 2):
        prompt: Any = {"prompt_token_ids": [first] * 600}
        (answer,) = llm.generate(prompt, sampling, use_tqdm=False)
        print("answered:", answer.outputs[0].finish_reason, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
