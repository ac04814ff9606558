"""Who: what separates one request's entries in LMCache from another's.

LMCache keys an entry by tokens, images and ``cache_salt``. What else vLLM lets into
its block hashes (LoRA adapters, prompt embeddings, whatever comes next) is taken from
vLLM's own function and put into the first tokens of each chunk, whose hashes chain.
"""

import hashlib
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache.logging import init_logger
from vllm.lora.utils import get_adapter_absolute_path
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(__name__)

MAX_SALT = 32
"""Characters of a ``cache_salt`` that LMCache gets; a longer one is digested."""

_VALUE_BYTES = 4
_VALUE_MASK = 0x7FFFFFFF  # as lmcache/integration/vllm/utils.py, apply_mm_hashes...


class Adapters:
    """Which weights the LoRA adapters of an engine have, for all its requests."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[Any, str | None]] = {}

    def version(self, lora_request: Any) -> str | None:
        """A digest of the adapter's files, or None if it cannot be told.

        An adapter replaced in place (``load_inplace``, or files changed on disk) has
        none until the engine restarts: vLLM's own prefix cache keeps what the former
        weights computed, so that no block of it can be told from another.
        """
        name = (lora_request.lora_name, lora_request.lora_path)
        try:
            folder = Path(get_adapter_absolute_path(lora_request.lora_path))
            files = sorted(f for f in folder.iterdir() if f.is_file())
            stamp = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
            seen, version = self._seen.get(name, (None, None))
            if stamp != seen:
                fresh: str | None = _digest_files(files)
                if seen is not None and fresh != version:
                    self._refuse(name, "its files changed")
                    fresh = None
                self._seen[name] = (stamp, fresh)
        except OSError as e:
            self._refuse(name, str(e))
            self._seen[name] = (None, None)
        return self._seen[name][1]

    def _refuse(self, name: tuple[str, str], why: str) -> None:
        if self._seen.get(name, ("", ""))[1] is not None:
            logger.warning(
                "LMCache is off for requests with LoRA adapter %s at %s until this "
                "engine restarts: %s. Load changed weights under a new path.",
                *name,
                why,
            )


def _digest_files(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as f:
            while block := f.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


class RequestKey:
    """One request's tokens as LMCache's keys get them.

    Args:
        request: vLLM's request, whose tokens may still grow.
        chunk_size: Tokens per LMCache chunk.
        adapters: The engine's.

    """

    def __init__(self, request: "Request", chunk_size: int, adapters: Adapters) -> None:
        self._request = request
        self._chunk_size = chunk_size
        self._marks: list[list[int]] = []
        self._version: str | None = None
        self.is_known = True
        """Whether it can be told what this request's pages depend on."""
        if request.lora_request is not None:
            self._version = adapters.version(request.lora_request)
            self.is_known = self._version is not None

    def token_ids(self) -> list[int]:
        """The request's tokens, the first ones of a chunk replaced by a digest of them
        and of what vLLM hashes with that chunk, if anything."""
        tokens = list(self._request.all_token_ids)
        for i in range(len(tokens) // self._chunk_size):
            start = i * self._chunk_size
            if i == len(self._marks):
                chunk = tokens[start : start + self._chunk_size]
                self._marks.append(self._mark(start, chunk))
            tokens[start : start + len(self._marks[i])] = self._marks[i]
        return tokens

    def _mark(self, start: int, chunk: list[int]) -> list[int]:
        end = start + self._chunk_size
        keys, _ = generate_block_hash_extra_keys(self._request, start, end, 0)
        if keys is None and self.is_known:
            return []
        nonce = self._version if self.is_known else uuid.uuid4().hex
        digest = sha256_cbor((chunk, keys, nonce))[: _VALUE_BYTES * len(chunk)]
        return [
            int.from_bytes(digest[i : i + _VALUE_BYTES], "big") & _VALUE_MASK
            for i in range(0, len(digest), _VALUE_BYTES)
        ]


def salt(cache_salt: str | None) -> str:
    """A ``cache_salt`` that LMCache's keys and file names take (custom_types.py)."""
    if not cache_salt or re.fullmatch(rf"[^@/\\\0]{{1,{MAX_SALT}}}", cache_salt):
        return cache_salt or ""
    return hashlib.sha256(cache_salt.encode()).hexdigest()[:MAX_SALT]
