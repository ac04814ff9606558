"""The patch set for vLLM and the tool that applies it."""

__version__ = "0.3.0"
"""This project's; the journal and patched wheels carry it."""
