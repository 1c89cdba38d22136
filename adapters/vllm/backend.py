"""vLLM's attention backend interface, as far as caches of our own need it: metadata in, no kernels."""

from dataclasses import dataclass
from functools import cached_property
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

    starts_S1, total_S, pages_SK: vLLM's own int32 buffers, which a recorded graph reads at every replay: the first row
    of each request and their end, tokens with those of the step, and pages, stale outside of what a request holds.
    Requests without tokens are padding, and stand behind the others. host_starts_S1: the same on the CPU.
    """

    starts_S1: Tensor
    total_S: Tensor
    pages_SK: Tensor
    host_starts_S1: Tensor

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each request that has any, a host number."""
        starts = self.host_starts_S1.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        kept = [i for i, length in enumerate(lengths) if length]
        assert kept == list(range(len(kept))), "padding stands behind the requests"
        return tuple(lengths[: len(kept)])

    @cached_property
    def past(self) -> tuple[int, ...]:
        """Earlier tokens of each; a host number, which is waited for."""
        total = self.total_S.tolist()
        return tuple(end - length for end, length in zip(total, self.lengths, strict=False))


class Builder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Reads the step off vLLM's own metadata. Graphs: `config.Hook` says whether there are any."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    reorder_batch_threshold = None

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, **_: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **_: Any
    ) -> Metadata:
        """Nothing is waited for, nothing is copied."""
        common = common_attn_metadata
        return Metadata(
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.query_start_loc_cpu,
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
