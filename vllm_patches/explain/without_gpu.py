"""How vLLM builds a model with no GPU, no weights and no other ranks.

The model's modules are made on torch's meta device, which has shapes and no memory. A
rank of many gets its groups from torch's own fake process group. An attention backend
of another platform is only asked what it says of the KV cache; nothing of it runs.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_patches.errors import PatchesError
from vllm_patches.explain.options import Options

CPUS = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")
"""The CPU's own attention backends."""
_NO_KERNELS = {"VLLM_ENABLE_GEMM_RS": "0", "VLLM_KIMI_K3_GEMM_AR": "0"}
"""Environment of models that would import kernels as they are made."""


class Elsewhere(CpuPlatform):
    """The platform of a GPU that is not here: vLLM's general rules only, without what
    the CPU's own adds to a config."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        vllm_config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
        vllm_config.compilation_config.mode = CompilationMode.NONE

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        Platform.update_block_size_for_backend.__func__(cls, vllm_config)  # type: ignore[attr-defined]


class _NoBuilder(AttentionMetadataBuilder):
    """In place of a builder that would allocate on a GPU."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def build(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@contextmanager
def assumed(options: Options) -> Iterator[list[Exception]]:
    """Let vLLM take the options' attention backend, kernel blocks and layout.

    Without a backend it is the CPU's own. Gives what went wrong as vLLM imported
    the model's code, which it only logs.

    Raises:
        PatchesError: if that backend cannot be asked here.

    """
    is_here = current_platform.is_cpu() and options.attention_backend in (None, *CPUS)
    with ExitStack() as stack:
        if not is_here:
            backend = _backend(options)
            before = current_platform.__class__
            stack.callback(setattr, current_platform, "__class__", before)
            current_platform.__class__ = Elsewhere  # type: ignore[assignment]
        own = selector._cached_get_attn_backend

        def select(*args: Any, **kwargs: Any) -> Any:
            if is_here:
                return _paging_by(own(*args, **kwargs), options.kernel_block_sizes)
            config = kwargs["attn_selector_config"]
            if config.use_mla != backend.is_mla():
                needed = "latent" if config.use_mla else "other than latent"
                raise PatchesError(
                    f"{options.attention_backend} is no attention backend for this "
                    f"model, whose attention is {needed} (MLA)"
                )
            return backend

        stack.enter_context(
            mock.patch.object(selector, "_cached_get_attn_backend", select)
        )
        failures: list[Exception] = []

        def look_here(look: Any) -> Any:
            try:
                return look()
            except Exception as e:
                failures.append(e)
                raise

        # vLLM looks at a model's class in a process of its own, to keep a GPU's memory.
        stack.enter_context(
            mock.patch.object(registry, "_run_in_subprocess", look_here)
        )
        env = dict(_NO_KERNELS)
        if options.kv_cache_layout:
            env["VLLM_KV_CACHE_LAYOUT"] = options.kv_cache_layout
        stack.enter_context(mock.patch.dict(os.environ, env))
        if not torch.cuda.is_available():
            for name in ("Stream", "Event"):
                stack.enter_context(mock.patch.object(torch.cuda, name, mock.Mock))
        yield failures


def _backend(options: Options) -> Any:
    """The options' attention backend, as far as it can be asked without its device."""
    name, sizes = options.attention_backend, options.kernel_block_sizes
    if name is None:
        raise PatchesError(
            "give --attention-backend: the model is made on the CPU, where vLLM does "
            "not choose among a GPU's"
        )
    try:
        member = AttentionBackendEnum[name]
    except (KeyError, ValueError):
        known = ", ".join(AttentionBackendEnum.__members__)
        raise PatchesError(
            f"{name} is no attention backend of this vLLM, which has {known}"
        ) from None
    try:
        backend = member.get_class()
    except Exception as e:
        # Whatever its module needs of a GPU or of another package.
        if not sizes:
            raise PatchesError(
                f"{name} cannot be imported here ({type(e).__name__}: "
                f"{' '.join(str(e).split())}): give its --kernel-block-size, once for "
                "each"
            ) from None
        is_mla = "MLA" in name
        backend = AttentionBackendEnum["CPU_MLA" if is_mla else "CPU_ATTN"].get_class()
    own = {
        "get_name": staticmethod(lambda: name),
        "get_builder_cls": staticmethod(lambda: _NoBuilder),
        "get_impl_cls": staticmethod(lambda: _not_running(backend.get_impl_cls())),
    }
    return _paging_by(type(backend.__name__, (backend,), own), sizes)


def _not_running(impl: Any) -> Any:
    """The implementation class, made without asking for its kernels."""
    return type(impl.__name__, (impl,), {"__init__": lambda self, *_, **__: None})


def _paging_by(backend: Any, sizes: Sequence[int]) -> Any:
    """The backend, made to take kernel blocks of these tokens only, if any."""
    if not sizes:
        return backend
    taken = staticmethod(lambda kv_cache_spec=None: list(sizes))
    own = {"get_supported_kernel_block_sizes": taken}
    return type(backend.__name__, (backend,), own)


def _nobody_answers(*args: Any, **kwargs: Any) -> None:
    """A rank that is alone would take what happens to lie in memory for an answer."""
    raise RuntimeError("the other ranks do not exist: nothing can be asked of them")


@contextmanager
def rank_of_many(vllm_config: VllmConfig, rank: int) -> Iterator[None]:
    """Be one rank of the config's world, alone."""
    parallel = vllm_config.parallel_config
    size, new_group = parallel.world_size, distributed.new_group
    init_group = parallel_state.init_model_parallel_group

    def fake_group(ranks: Any, **kwargs: Any) -> Any:
        return new_group(ranks, backend="fake")

    def silent_group(*args: Any, **kwargs: Any) -> Any:
        quiet = {
            "use_message_queue_broadcaster": False,
            "use_device_communicator": False,
        }
        return init_group(*args, **kwargs | quiet)

    def same_node(*args: Any) -> list[bool]:
        return [True] * size

    with (
        set_current_vllm_config(vllm_config),
        mock.patch.object(distributed, "new_group", fake_group),
        mock.patch.object(distributed, "broadcast_object_list", _nobody_answers),
        mock.patch.object(distributed, "all_gather_object", _nobody_answers),
        mock.patch.object(parallel_state, "in_the_same_node_as", same_node),
        mock.patch.object(parallel_state, "init_model_parallel_group", silent_group),
    ):
        try:
            distributed.init_process_group(
                "fake", store=FakeStore(), rank=rank, world_size=size
            )
            parallel_state.init_distributed_environment(size, rank, "", 0, "fake")
            parallel_state.initialize_model_parallel(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                decode_context_model_parallel_size=parallel.decode_context_parallel_size,
                backend="fake",
            )
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


class _Constants(TorchFunctionMode):
    """Keeps values that a module writes down off the meta device: it may read them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:
            kwargs = {"device": "cpu"} | kwargs
        return func(*args, **kwargs)


def build_model(vllm_config: VllmConfig) -> None:
    """Make the model's modules: they enter the config's static forward context."""
    dtype: Any = vllm_config.model_config.dtype
    with set_default_torch_dtype(dtype), torch.device("meta"), _Constants():
        initialize_model(vllm_config)
