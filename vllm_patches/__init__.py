"""The patch set for vLLM and the tool that applies it."""
