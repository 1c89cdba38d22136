"""The formats that config.json implies, for a checkpoint that no file decides about yet."""

from unified_models.checkpoint.match import quantization_of
from unified_models.checkpoint.names import Names
from unified_models.checkpoint.quantized import base
from unified_models.formats import find
from unified_models.model import LanguageModel
from unified_models.weight import Weight


def bind_implied(model: LanguageModel) -> None:
    """Give every weight whose format a file would decide the one that a pattern of config.json implies."""
    names = Names.of(model)
    quantization = quantization_of(names)
    if quantization is None:
        return
    for part in names.parts:
        if isinstance(part.owner, Weight) and part.owner.declared is None and not part.index:
            part.owner.stored = find(quantization.expected(base(part.name)))
            part.owner.bind(part.owner.stored.name)
