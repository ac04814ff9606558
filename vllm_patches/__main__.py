"""`python -m vllm_patches` is `vllm-patches`."""

from vllm_patches.cli import app

app(prog_name="vllm-patches")
