"""config.json as vLLM sees it: the sizes it asks for, and nothing that would switch on code for its own classes."""

import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.platforms import current_platform
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from unified_models import registry
from unified_models.adapters.vllm.paged import readable
from unified_models.adapters.vllm.plugin import ARCHITECTURE
from unified_models.checkpoint.loading import architecture
from unified_models.context.slots import Slot, State

CHECKS = "unified_models.adapters.vllm.requests:Checks"
WORKER = "unified_models.adapters.vllm.worker.UnifiedWorker"
NUMERICS = ("deployed", "float32")
GRAPHS = ("NONE", "FULL", "FULL_DECODE_ONLY")


class UnifiedConfig(PreTrainedConfig):  # type: ignore[misc]
    """The sizes that vLLM reads, and `raw`, the checkpoint's own config.json.

    vLLM finds no quantization_config and no known model_type here: the formats are ours to read.
    """

    model_type = "unified_models"

    def __init__(self, raw: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.raw = raw or {}
        super().__init__(**kwargs)

    @property
    def quantization_config(self) -> None:
        """Formats are read by our own loader, from the tensors."""

    @quantization_config.setter
    def quantization_config(self, _: Any) -> None:
        """vLLM attaches hf_quant_config.json; it has no use for it here."""


class Parser(ConfigParserBase):  # type: ignore[misc]
    """`LLM(path, config_format="unified")`."""

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        """The pair that vLLM asks for. ValueError: not a config.json that an architecture of ours reads."""
        module, raw = architecture(folder_of(model, revision))
        ours = module.Config.from_json(raw, f"{model}/config.json")
        names = ("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings")
        sizes = {name: getattr(ours, name) for name in names}
        for name in ("head_dim", "bos_token_id", "eos_token_id"):
            sizes[name] = getattr(ours, name)
        layers = raw.get("num_hidden_layers") or len(ours.layers_block_type)
        config = UnifiedConfig(
            raw,
            architectures=[ARCHITECTURE],
            dtype="bfloat16",
            num_hidden_layers=layers,
            num_key_value_heads=1,
            tie_word_embeddings=False,
            **sizes,
        )
        return {}, config


def folder_of(model: str | Path, revision: str | None) -> Path:
    """Where the JSON files of a model lie: a folder, or the hub's copy of a repository."""
    if Path(model).is_dir():
        return Path(model)
    found = snapshot_download(str(model), revision=revision, allow_patterns="*.json")
    return Path(found)


class Hook:
    """What our architecture asks of vLLM's settings, and what it refuses."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Before the rest of the settings is known."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse in one line what is not exact; switch on what is."""
        for wrong, value in refusals(vllm_config):
            raise ValueError(f"unified_models: {wrong}, got {value!r}")
        model = vllm_config.model_config
        model.logprobs_mode = "processed_logprobs"
        model.logits_processors = [CHECKS]
        model.disable_cascade_attn = True
        parallel = vllm_config.parallel_config
        known = current_platform.is_cpu() or current_platform.is_cuda_alike()
        if known and parallel.worker_cls == "auto":  # else it is filled in by the platform, later
            parallel.worker_cls = WORKER
        compilation, cache = vllm_config.compilation_config, vllm_config.cache_config
        compilation.mode = CompilationMode.NONE
        log = logging.getLogger("vllm.unified_models")
        if cache.enable_prefix_caching and not model.enforce_eager and waits(vllm_config):
            log.warning("no prefix cache beside CUDA graphs: %s", waits(vllm_config))
            cache.enable_prefix_caching = False
        if (reason := paged(vllm_config)) is not None or model.enforce_eager:
            model.enforce_eager = True
            compilation.cudagraph_mode = CUDAGraphMode.NONE
            if reason is not None and not current_platform.is_cpu():
                log.warning("no CUDA graphs: %s", reason)
        elif compilation.cudagraph_mode is None:
            # A batch that mixes prompts and single tokens is a batch like any other.
            compilation.cudagraph_mode = CUDAGraphMode.FULL


def paged(vllm_config: Any) -> str | None:
    """Why kernels cannot read all of this model's pages by what the device knows of a step; None: they can, and steps
    may be recorded as CUDA graphs."""
    if current_platform.is_cpu():
        return "the CPU reads the lists of a step"
    if not readable(slots_of(vllm_config)):
        return "the model keeps what has no kernel of its own yet"
    return waits(vllm_config) if vllm_config.cache_config.enable_prefix_caching else None


def waits(vllm_config: Any) -> str | None:
    """Why a prefix cache needs the host to know each step; None: it does not, or this is a CPU."""
    if current_platform.is_cpu() or not any(isinstance(s, State) for s in slots_of(vllm_config)):
        return None
    return (
        "a prefix may be found in the very step that computes it, and a scan has to wait for its state then; "
        "enforce_eager=True keeps the cache"
    )


def slots_of(vllm_config: Any) -> list[Slot]:
    """What the model keeps."""
    raw = vllm_config.model_config.hf_config.raw
    module = registry.find(raw["model_type"])
    with torch.device("meta"):
        model = module.Model(module.Config.from_json(raw))
    return list(model.slots().values())


def refusals(vllm_config: Any) -> list[tuple[str, Any]]:
    """(what is wrong, the value) of every setting under which bits would not be kept."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    wrong: list[tuple[str, Any]] = []
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
    ):
        value = getattr(parallel, name, 1)
        if value != 1:
            wrong.append((f"{name} must be 1: reductions between ranks would change bits", value))
    if vllm_config.speculative_config is not None:
        wrong.append(
            ("speculative decoding is not exact yet", vllm_config.speculative_config.method)
        )
    if vllm_config.lora_config is not None:
        wrong.append(("LoRA adds to products outside our operators", "enable_lora=True"))
    load_format = getattr(vllm_config.load_config, "load_format", None)
    if load_format == "dummy":
        why = "the number formats of weights are read from the checkpoint"
        wrong.append((f"load_format must be 'auto': {why}", load_format))
    outputs = getattr(vllm_config, "aux_output_config", model)
    if getattr(outputs, "enable_return_routed_experts", False):
        wrong.append(("the experts of a token are not returned: equal bits need no replay", True))
    numerics = (vllm_config.additional_config or {}).get("numerics", NUMERICS[0])
    if numerics not in NUMERICS:
        wrong.append((f"additional_config: numerics must be one of {NUMERICS}", numerics))
    if model.logits_processors not in (None, [CHECKS]):
        wrong.append(("logits processors change the distribution", model.logits_processors))
    mode, graphs = (
        vllm_config.compilation_config.mode,
        vllm_config.compilation_config.cudagraph_mode,
    )
    if mode is not None and mode.name != "NONE":
        why = "torch.compile keeps float32 between fused operators, and changes bits"
        wrong.append((f"compilation_config: mode must be left unset: {why}", mode.name))
    if graphs is not None and graphs.name not in GRAPHS:
        why = "pieces are cut by torch.compile"
        wrong.append(
            (f"compilation_config: cudagraph_mode must be of {GRAPHS}: {why}", graphs.name)
        )
    if not current_platform.is_cpu() and getattr(vllm_config, "use_v2_model_runner", False):
        reason = "its order of sums in log_softmax has no GPU operator yet; set VLLM_USE_V2_MODEL_RUNNER=0"
        wrong.append((f"vLLM's V2 runner: {reason}", current_platform.device_type))
    if model.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
        wrong.append(("logprobs_mode must be 'processed_logprobs'", model.logprobs_mode))
    return wrong
