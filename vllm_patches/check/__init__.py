"""The proof on the user's own machine, `vllm-patches check`.

Nothing here is loaded by an engine that is not checked. The command starts and ends
processes of its own, one file each:

==================  ==========================================================
``command.py``      what is run one after the other, and what it gives
``verdict.py``      which pages agree, how far answers differ; the result
``engine.py``       an engine's process: vLLM's own flags, prompts, answers
``audit.py``        in its workers: connectors that note what every page holds
``pages.py``        without an engine: KV caches of many geometries
``roles.py``        both roles of a connector without an engine
``processes.py``    LMCache servers and processes, ended with their shared memory
``guard.py``        ends a process once the command is gone, however it went
==================  ==========================================================
"""
