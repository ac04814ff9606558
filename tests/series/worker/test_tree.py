"""Where these tests run."""

import os
from pathlib import Path

import vllm


def test_vllm_is_the_tree() -> None:
    """In a release's own process, vLLM is that release's patched tree."""
    if tree := os.environ.get("SERIES_TREE"):
        assert Path(vllm.__file__) == Path(tree, "vllm", "__init__.py")
