"""The fingerprint in LMCache's namespace: agreement, length, versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_hook import namespace
from lmcache_hook.namespace import CONTRACT_VERSION, Fingerprint

A, B = "a" * 64, "b" * 64


def workers(*digests: str) -> dict[tuple[int, int], Fingerprint]:
    return {(0, i): Fingerprint(d, CONTRACT_VERSION) for i, d in enumerate(digests)}


def test_workers_that_agree() -> None:
    assert namespace.agree(workers(A, A, A, A)) == A


def test_workers_that_disagree_are_named_with_their_fingerprints() -> None:
    with pytest.raises(ValueError, match="page the KV cache differently") as e:
        namespace.agree(workers(A, B, A))
    assert f"{A} on workers [(0, 0), (0, 2)]" in str(e.value)
    assert f"{B} on workers [(0, 1)]" in str(e.value)


def test_worker_of_another_contract_version() -> None:
    other = {0: Fingerprint(A, CONTRACT_VERSION + 1)}
    with pytest.raises(RuntimeError, match=f"follow contract {CONTRACT_VERSION + 1}"):
        namespace.agree(other)


def test_another_connectors_handshake() -> None:
    with pytest.raises(RuntimeError, match="brought object instead of a fingerprint"):
        namespace.agree({0: object()})


def test_hook_and_overlay_follow_one_contract() -> None:
    from vllm.v1.worker import logical_blocks

    assert logical_blocks.CONTRACT_VERSION == CONTRACT_VERSION


def test_namespace_too_long_for_a_file_name() -> None:
    namespace.extend("m" * 130, A)
    with pytest.raises(ValueError, match=r"file names of \d+ bytes, over 255.*shorter"):
        namespace.extend("m" * 200, A)


def test_the_two_fp8_formats_have_namespaces_of_their_own() -> None:
    names = {namespace.extend("m", A, t) for t in ("fp8", "fp8_e4m3", "fp8_e5m2")}
    assert len(names) == 2


digests = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(st.text("abc/-_.", max_size=40), digests, digests)
def test_one_namespace_a_fingerprint(model: str, first: str, second: str) -> None:
    one, other = namespace.extend(model, first), namespace.extend(model, second)
    assert (one == other) == (first[:16] == second[:16])
    assert one.startswith(model) and one != model
