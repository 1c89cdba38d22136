"""Operators. A model file uses the token-local ones directly; those where tokens meet are reached by the context."""

from unified_models.ops.activation import relu2, sigmoid, silu, softplus, swiglu, time_step
from unified_models.ops.gated_norm import gated_norm
from unified_models.ops.hyper_connect import (
    hyper_collapse,
    hyper_expand,
    hyper_maps,
    hyper_normalize,
)
from unified_models.ops.rms_norm import rms_norm
from unified_models.ops.rope import Rope, rope
from unified_models.ops.router_scores import route_weights, sqrt_softplus
from unified_models.ops.scan import decay_rates
from unified_models.ops.sums import row_sum

__all__ = [
    "Rope",
    "decay_rates",
    "gated_norm",
    "hyper_collapse",
    "hyper_expand",
    "hyper_maps",
    "hyper_normalize",
    "relu2",
    "rms_norm",
    "rope",
    "route_weights",
    "row_sum",
    "sigmoid",
    "silu",
    "softplus",
    "sqrt_softplus",
    "swiglu",
    "time_step",
]
