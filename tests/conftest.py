"""Options of all tests, a core for each of pytest's processes, and their counts."""

import os
from collections import Counter
from typing import Any

import pytest

TALLY = pytest.StashKey[Counter[str]]()
"""What the tests of the overlay have gone through."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="also run what goes beyond the default suite: both model runners and "
        "both kernel block sizes on every release",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Give the engines of this process one thread, on a core of its own.

    With one, the CPU kernels' sums do not depend on where a prompt is cut into steps:
    an answer from any cache equals the computed one, bit for bit (test_requests.py).
    """
    cores = sorted(os.sched_getaffinity(0))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[number % len(cores)])
    config.stash[TALLY] = Counter()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out the tests that are marked "full", unless asked for."""
    if config.getoption("full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["tally"] = dict(session.config.stash[TALLY])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    tally = getattr(node, "workeroutput", {}).get("tally", {})
    node.config.stash[TALLY].update(tally)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not (tally := config.stash[TALLY]):
        return
    terminalreporter.section("views of the KV cache")
    terminalreporter.line(
        f"{tally['geometries']} geometries and {tally['examples']} random examples: "
        "every view is its page, byte for byte"
    )
    terminalreporter.line(
        f"LMCache took our views of all {tally['judged']} cases it judged; its own "
        f"edits address the same bytes in {tally['right']}, refuse {tally['refused']} "
        f"and get {tally['wrong']} wrong"
    )
