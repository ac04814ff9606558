"""KV cache pools as a worker binds them, and the bytes that their block ids own.

Builds on the spec classes of whichever vLLM is imported, so that the same tests run
on every release. A layer's truth is kept as plain numbers, apart from its tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.logical_blocks import LogicalKVCaches, build_logical_kv_caches

HAS_PLACEMENTS = "layers" in {f.name for f in fields(KVCacheTensor)}
"""Whether the release's KV cache config places every layer (vLLM 0.29 on)."""
HAS_TOKENS_PER_STATE = "tokens_per_state" in {
    f.name for f in fields(interface.MLAAttentionSpec)
}
"""Whether slot compression is declared as tokens per state (vLLM 0.29 on)."""


def full(block_size: int, **kwargs: Any) -> KVCacheSpec:
    """A full attention spec; two heads of 4 bf16 elements unless told otherwise."""
    return attention("FullAttentionSpec", block_size, **kwargs)


def attention(kind: str, block_size: int, **kwargs: Any) -> KVCacheSpec:
    """An attention spec of the named class."""
    values = {"num_kv_heads": 2, "head_size": 4, "dtype": torch.bfloat16}
    return getattr(interface, kind)(block_size=block_size, **(values | kwargs))


def mla(block_size: int, width: int = 8, ratio: int = 1, **kwargs: Any) -> KVCacheSpec:
    """An MLA spec with one slot of ``width`` elements per ``ratio`` tokens."""
    name = "tokens_per_state" if HAS_TOKENS_PER_STATE else "compress_ratio"
    kwargs = {"num_kv_heads": 1, "head_size": width, name: ratio} | kwargs
    return attention("MLAAttentionSpec", block_size, **kwargs)


def mamba(block_size: int, shapes: Any, dtypes: Any, **kwargs: Any) -> MambaSpec:
    """A Mamba spec that keeps reusable states."""
    kwargs = {"mamba_cache_mode": "align"} | kwargs
    return MambaSpec(
        block_size=block_size, shapes=tuple(shapes), dtypes=tuple(dtypes), **kwargs
    )


@dataclass
class Layer:
    """One layer of a pool, and where its pages truly lie (bytes)."""

    spec: KVCacheSpec
    form: str
    k: int = 1
    base: int = 0
    stride: int = 0

    @property
    def page(self) -> int:
        return self.spec.page_size_bytes


@dataclass
class Pool:
    """One storage that all layers' pages lie in.

    Layers of one group lie one after the other, or with ``blocks_first`` side by side
    in every block. Groups overlay each other.
    """

    num_blocks: int
    kv_layout: str = "NHD"
    blocks_first: bool = False
    offset: int = 0
    """Bytes of the storage before the pool."""
    tail: int = 0
    """Bytes of the storage behind the pool."""
    extra_blocks: int = 0
    """Blocks that the tensors have beyond ``num_blocks``."""
    layers: dict[str, Layer] = field(default_factory=dict)
    groups: list[KVCacheGroupSpec] = field(default_factory=list, repr=False)
    kernel_block_sizes: list[int] = field(default_factory=list)
    kv_caches: dict[str, Any] = field(default_factory=dict, repr=False)
    storage: torch.Tensor = field(default=torch.empty(0), repr=False)
    tensors: list[KVCacheTensor] = field(default_factory=list, repr=False)

    def add(
        self,
        spec: KVCacheSpec | Sequence[KVCacheSpec],
        form: str | Sequence[str] = "rank4",
        kernel_block_size: int | None = None,
        layers: int = 1,
    ) -> "Pool":
        """Add a group: ``layers`` layers of one spec, or one layer per spec."""
        specs = [spec] * layers if isinstance(spec, KVCacheSpec) else list(spec)
        forms = [form] * len(specs) if isinstance(form, str) else form
        names = [f"layers.{len(self.layers) + i}" for i in range(len(specs))]
        block_size = specs[0].block_size
        kernel_block_size = kernel_block_size or block_size
        for name, layer_spec, layer_form in zip(names, specs, forms):
            k = 1 if layer_form in MAMBA_FORMS else block_size // kernel_block_size
            self.layers[name] = Layer(layer_spec, layer_form, k)
        group_spec = specs[0]
        if not isinstance(spec, KVCacheSpec):
            group_spec = UniformTypeKVCacheSpecs(
                block_size=block_size, kv_cache_specs=dict(zip(names, specs))
            )
        self.groups.append(KVCacheGroupSpec(names, group_spec))
        self.kernel_block_sizes.append(kernel_block_size)
        return self

    def bind(self) -> "Pool":
        """Place every layer, allocate the storage and bind the tensors."""
        blocks = self.num_blocks + self.extra_blocks
        pages = {
            id(g): [self.layers[name].page for name in g.layer_names]
            for g in self.groups
        }
        block = max((sum(p) for p in pages.values()), default=0)
        size = self.offset + block * blocks + self.tail
        for group in self.groups:
            at = self.offset
            for name in group.layer_names:
                layer = self.layers[name]
                layer.base = at
                layer.stride = block if self.blocks_first else layer.page
                at += layer.page if self.blocks_first else layer.page * blocks
                self._place(name, layer, size)
        self.storage = torch.zeros(size, dtype=torch.uint8)
        for name, layer in self.layers.items():
            self.kv_caches[name] = bind(self.storage, layer, blocks, self.kv_layout)
        return self

    def _place(self, name: str, layer: Layer, size: int) -> None:
        kwargs: dict[str, Any] = {"layers": [name], "layer_stride": layer.page}
        if not HAS_PLACEMENTS:
            kwargs = {"shared_by": [name]}
        if HAS_PLACEMENTS or self.blocks_first:
            kwargs |= {"block_stride": layer.stride, "offset": layer.base}
        self.tensors.append(KVCacheTensor(size=size, **kwargs))

    @property
    def config(self) -> KVCacheConfig:
        return KVCacheConfig(self.num_blocks, self.tensors, self.groups)

    def build(self, **kwargs: Any) -> LogicalKVCaches:
        return build_logical_kv_caches(
            self.config,
            self.kv_caches,
            self.kernel_block_sizes,
            self.kv_layout,
            **({"attn_groups": [self.attn_groups()]} | kwargs),
        )

    def attn_groups(self, backend: str = "") -> list[Any]:
        """What the worker's attention groups say of the tensors it bound."""
        return [
            attn_group(layer.form, [name], layer.spec, group_id, backend)
            for group_id, group in enumerate(self.groups)
            for name in group.layer_names
            if (layer := self.layers.get(name))
        ]


def attn_group(
    form: str, layer_names: list[str], spec: Any, group_id: int, backend: str = ""
) -> Any:
    """An attention group whose backend binds K and V as the form says."""

    class Backend:
        @staticmethod
        def get_name() -> str:
            return backend

    class PlanesBackend(Backend):
        """As backends up to vLLM 0.28 are, which bind K and V as a dim."""

        @staticmethod
        def get_kv_cache_block_dim(*args: int) -> int:
            return 1 if form == "kv_first" else 0

        @staticmethod
        def get_kv_cache_shape(*args: int) -> tuple[int, ...]:
            shape = (args[0], 2, *args[1:])
            return swap(shape, 0, 1) if form == "kv_first" else shape

    return SimpleNamespace(
        backend=PlanesBackend if form in ("rank5", "kv_first") else Backend,
        layer_names=layer_names,
        kv_cache_spec=spec,
        kv_cache_group_id=group_id,
        metadata_builders=[],
    )


MAMBA_FORMS = ("states", "row", "content")


def bind(storage: torch.Tensor, layer: Layer, num_blocks: int, layout: str) -> Any:
    """Bind a layer's pages as a release's worker does.

    Forms: "rank5" ``[B, 2, N, H, D]`` and "kv_first" ``[2, B, N, H, D]``; "rank4"
    ``[B, H, N, C]``; "rank3" ``[B, N, C]``; "head_last" ``[B, N, 1, C]``; "states", a
    list; "row" ``[B, 1, 1, page]`` and "content" ``[B, 1, 1, states' bytes]``.
    """
    spec: Any = layer.spec
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    if layer.form == "states":
        return _bind_states(storage, layer, num_blocks)
    if layer.form in MAMBA_FORMS:
        row = layer.page if layer.form == "row" else content_size(spec)
        shape, strides = (num_blocks, 1, 1, row), (layer.stride, row, row, 1)
        return strided(storage, torch.int8, layer.base, shape, strides)
    unpadded = content_size(spec)
    item = spec.dtype.itemsize
    states = slots(spec) // layer.k
    heads = spec.num_kv_heads
    width = unpadded // (heads * states * layer.k)
    token_major = "NH" in layout
    page_stride = layer.stride // layer.k
    head, state = (width, heads * width) if token_major else (states * width, width)
    pages = num_blocks * layer.k
    if layer.form in ("rank5", "kv_first"):
        shape = (pages, 2, states, heads, width // item // 2)
        half = unpadded // layer.k // 2
        strides = (page_stride, half, state // 2, head // 2, item)
        if layer.form == "kv_first":
            shape, strides = swap(shape, 0, 1), swap(strides, 0, 1)
    elif layer.form == "rank4":
        shape = (pages, heads, states, width // item)
        strides = (page_stride, head, state, item)
    elif layer.form == "rank3":
        shape, strides = (pages, states, width // item), (page_stride, width, item)
    else:
        assert layer.form == "head_last"
        shape = (pages, states, 1, width // item)
        strides = (page_stride, width, width, item)
    return strided(storage, spec.dtype, layer.base, shape, strides)


def _bind_states(storage: torch.Tensor, layer: Layer, blocks: int) -> list[Any]:
    states, base = [], layer.base
    spec: Any = layer.spec
    for shape, dtype in zip(spec.shapes, spec.dtypes):
        inner = [math.prod(shape[i + 1 :]) * dtype.itemsize for i in range(len(shape))]
        strides = (layer.stride, *inner)
        states.append(strided(storage, dtype, base, (blocks, *shape), strides))
        base += math.prod(shape) * dtype.itemsize
    return states


def strided(
    storage: torch.Tensor,
    dtype: torch.dtype,
    base: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """A tensor over the storage; base and strides in bytes."""
    item = dtype.itemsize
    assert base % item == 0 and all(stride % item == 0 for stride in strides)
    return torch.empty(0, dtype=dtype).set_(
        storage.untyped_storage(), base // item, shape, [s // item for s in strides]
    )


def swap(values: Sequence[int], i: int, j: int) -> tuple[int, ...]:
    swapped = list(values)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    return tuple(swapped)


def slots(spec: Any) -> int:
    """Slots that the spec declares."""
    return spec.num_states if HAS_TOKENS_PER_STATE else spec.storage_block_size


def content_size(spec: Any) -> int:
    """Bytes of a page without its padding."""
    if isinstance(spec, MambaSpec):
        return sum(math.prod(s) * d.itemsize for s, d in zip(spec.shapes, spec.dtypes))
    return getattr(spec, "unpadded_page_size_bytes", spec.real_page_size_bytes)


def check(pool: Pool, caches: LogicalKVCaches) -> None:
    """The property: page n of a view is the storage's bytes of page n.

    For random bytes in the storage. Nothing outside a page is reachable through it,
    every byte inside is but padding; no two pages overlap; the storage is the same one.
    The same with padding, which is then reachable too.
    """
    assert set(caches) == set(pool.kv_caches) and len(caches) == len(pool.kv_caches)
    padded = caches.with_padding()
    for name, layer in pool.layers.items():
        check_layer(pool, caches, name, layer)
        check_layer(pool, padded, name, layer, shows_padding=True)


def check_layer(
    pool: Pool,
    caches: LogicalKVCaches,
    name: str,
    layer: Layer,
    shows_padding: bool = False,
) -> None:
    view, blocks, storage = caches[name], caches.blocks[name], pool.storage
    raw, page = pool.kv_caches[name], layer.page
    is_raw = view is raw
    assert view.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    assert blocks.num_blocks == pool.num_blocks
    assert (blocks.page_size_bytes, blocks.block_size) == (page, layer.spec.block_size)
    assert layer.spec.block_size % blocks.slots_per_block == 0
    assert blocks.blocks_per_kv_block == layer.k
    assert blocks.pages.shape == (pool.num_blocks, page)
    assert blocks.pages.untyped_storage().data_ptr() == storage.data_ptr()
    if pool.num_blocks > 1:
        assert blocks.block_stride_bytes == layer.stride >= page
    shown = content = content_size(layer.spec)
    if not is_raw:
        assert view.shape[0] == pool.num_blocks
        shown = view[0].numel() * view.element_size()
        up_to_0_25 = view.ndim == 5 or layer.form == "states"
        has_padding = shows_padding or up_to_0_25
        most = page if has_padding else min(page, content + content // 100 + 4)
        assert (page if has_padding else content) <= shown <= most
    storage.random_(256)
    for n in range(pool.num_blocks):
        start = layer.base + n * layer.stride
        expected = storage[start : start + page]
        assert torch.equal(blocks.pages[n], expected)
        if not is_raw:
            assert torch.equal(page_bytes(view[n]), expected[:shown])
    for n in {0, pool.num_blocks // 2, pool.num_blocks - 1}:
        start = layer.base + n * layer.stride
        storage.zero_()
        page_of(view, n, is_raw, layer).view(torch.uint8).fill_(255)
        assert storage[start : start + page].count_nonzero() == shown
        assert storage.count_nonzero() == shown


def page_bytes(page: torch.Tensor) -> torch.Tensor:
    """A dense page's bytes in the order of its dims."""
    assert page.is_contiguous()
    return page.view(torch.uint8).flatten()


def page_of(view: torch.Tensor, n: int, is_raw: bool, layer: Layer) -> torch.Tensor:
    return view[:, n] if is_raw and layer.form == "kv_first" else view[n]


def translate(layout: str) -> Mapping[str, str]:
    """LMCache's layout hints for a resolved KV cache layout."""
    from lmcache.integration.vllm.utils import translate_vllm_kv_cache_layout

    return {"kv_layout": translate_vllm_kv_cache_layout(layout)}


HAS_ALLOCATION = hasattr(interface, "create_kv_cache_views")
"""Whether the release allocates one buffer for all layers (vLLM 0.29 on)."""


def allocate(
    num_blocks: int,
    layout: str,
    groups: list[KVCacheGroupSpec],
    kernel_block_sizes: list[int],
) -> Pool:
    """A pool that vLLM's own code configures, allocates and views (0.29 on)."""
    from vllm.config import DeviceConfig, VllmConfig
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    try:  # vLLM 0.33 on
        from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.cache_config.kv_cache_layout = layout
    config.cache_config.num_gpu_blocks_override = num_blocks
    kv_cache_config = get_kv_cache_config_from_groups(config, groups, 1 << 30)
    kv_caches = allocate_kv_cache(
        kv_cache_config, torch.device("cpu"), KVCacheLayout[layout], kernel_block_sizes
    )
    pool = Pool(num_blocks, layout)
    pool.groups, pool.tensors = groups, kv_cache_config.kv_cache_tensors
    pool.kernel_block_sizes, pool.kv_caches = kernel_block_sizes, kv_caches
    for tensor in pool.tensors:
        for i, name in enumerate(tensor.layers):
            group_id, group = next(
                (i, g) for i, g in enumerate(groups) if name in g.layer_names
            )
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            is_mamba = isinstance(spec, MambaSpec)
            pool.layers[name] = Layer(
                spec,
                "content" if is_mamba else "rank4",
                1 if is_mamba else spec.block_size // kernel_block_sizes[group_id],
                tensor.offset + i * tensor.layer_stride,
                tensor.block_stride,
            )
    storage = next(iter(kv_caches.values())).untyped_storage()
    pool.storage = torch.empty(0, dtype=torch.uint8).set_(storage)
    return pool
