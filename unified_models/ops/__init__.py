"""Operators. A model file uses the token-local ones directly; those where tokens meet are reached by the context."""

from unified_models.ops.activation import sigmoid, swiglu
from unified_models.ops.hyper_connect import (
    hyper_collapse,
    hyper_expand,
    hyper_maps,
    hyper_normalize,
)
from unified_models.ops.rms_norm import rms_norm
from unified_models.ops.rope import Rope, rope
from unified_models.ops.router_scores import sqrt_softplus

__all__ = [
    "Rope",
    "hyper_collapse",
    "hyper_expand",
    "hyper_maps",
    "hyper_normalize",
    "rms_norm",
    "rope",
    "sigmoid",
    "sqrt_softplus",
    "swiglu",
]
