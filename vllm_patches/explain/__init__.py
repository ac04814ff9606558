"""What vLLM will do to a model's KV cache, told before an engine runs.

| file | question |
| --- | --- |
| `options.py` | What is asked: a config, and the options an engine would get |
| `without_gpu.py` | How vLLM builds a model with no GPU, weights or other ranks |
| `plan.py` | What vLLM makes of it: specs, groups, pools and views of each stage |
| `explained.py` | What that means for an operator, as a result of the tool |
| `picture.py` | One page of every group, to scale |

Needs vLLM and LMCache in its environment, and imports them only when asked.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_patches.errors import PatchesError
from vllm_patches.explain.options import Options, model_folder

if TYPE_CHECKING:
    from vllm_patches.explain.explained import Explained

_ALONE = {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment that keeps vLLM and LMCache off the network."""


def explain(path: Path, options: Options, svg: Path | None = None) -> "Explained":
    """What vLLM does to the KV cache of the model with this config.

    Args:
        path: Its `config.json`, or the folder of it.
        options: What an engine would be started with.
        svg: A file to draw one page of every group in.

    Raises:
        PatchesError: if this is no model's config, vLLM takes no such model or
            options, or it cannot be asked in this environment.

    """
    folder = model_folder(path)
    for name, value in _ALONE.items():
        os.environ.setdefault(name, value)
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        told = _explain(folder, options)
    finally:
        logging.disable(before)
    if svg is not None:
        from vllm_patches.explain.picture import picture

        try:
            svg.write_text(picture(told))
        except OSError as e:
            raise PatchesError(f"{svg} cannot be written: {e.strerror}") from None
    return told


def _explain(folder: Path, options: Options) -> "Explained":
    try:
        import vllm.v1.worker.logical_blocks  # noqa: F401

        from lmcache_hook import connector  # noqa: F401
    except ImportError as e:
        raise PatchesError(
            f"{e}: explain runs where LMCache and a patched vLLM are installed; run "
            "`vllm-patches status`"
        ) from None
    from vllm_patches.explain.explained import explained
    from vllm_patches.explain.plan import plan

    return explained(folder, options, plan(folder, options))
