"""vLLM's attention backend interface, as far as caches of our own need it: metadata in, no kernels."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    MultipleOf,
)


@dataclass(frozen=True)
class Metadata:
    """What one group of caches is told about a step: tokens of each request in it and before it, and its pages.

    lengths, past: host numbers. pages_SK: int64; stale outside of what a request holds.
    """

    lengths: tuple[int, ...]
    past: tuple[int, ...]
    pages_SK: Tensor


class Builder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Reads the step off vLLM's own metadata."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold = None

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, **_: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **_: Any
    ) -> Metadata:
        """Requests without tokens are padding."""
        common = common_attn_metadata
        starts = common.query_start_loc_cpu.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        total = common.seq_lens.tolist()
        kept = [i for i, length in enumerate(lengths) if length]
        assert kept == list(range(len(kept))), "padding stands behind the requests"
        return Metadata(
            tuple(lengths[: len(kept)]),
            tuple(total[i] - lengths[i] for i in kept),
            common.block_table_tensor[: len(kept)].long(),
        )


class Backend(AttentionBackend):  # type: ignore[misc]
    """Caches of bytes; each page of each layer may have its own size."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "UNIFIED_MODELS"

    @staticmethod
    def get_impl_cls() -> Any:
        raise AssertionError("our layers call their operators themselves")

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        """Asked by vLLM 0.26, which has no layouts yet."""
        return (num_blocks, block_size, num_kv_heads * head_size)

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        """Asked by vLLM 0.26: pages may be padded."""
        return True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """Block-outermost: the pages of a group lie side by side, unpadded, so groups may differ in size."""
        try:
            from vllm.v1.kv_cache_layout import KVCacheLayout
        except ImportError:
            return None
        return (KVCacheLayout.BLNHC, KVCacheLayout.BLHNC)
