"""Run a module as ``python -m`` does, and end with whoever started it.

``python -m vllm_patches.check.guard MODULE ARGUMENT...`` leads a session. Its standard
input is a pipe whose other end the starter holds: it closes when the starter is gone,
killed or not. Then the session's processes and their shared memory of LMCache's go.
"""

import os
import runpy
import sys
import threading


def _end_with_starter(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    from vllm_patches.check import processes

    members = processes.session_members(os.getpid())
    processes.kill(members)
    for segment in processes.shared_memory().get(os.getpid(), []):
        segment.unlink(missing_ok=True)
    os._exit(1)


def main() -> None:
    pipe = os.dup(0)
    # What it starts must not hold the pipe, nor read from it.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_with_starter, args=[pipe], daemon=True).start()
    module, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
