"""A causal depthwise convolution as torch has it, over one whole sequence, in the precision of its input."""

from torch import Tensor
from torch.nn import functional as F


def conv(x_TC: Tensor, taps_CK: Tensor, bias_C: Tensor | None) -> Tensor:
    K = taps_CK.shape[1]
    padded = F.pad(x_TC.T, (K - 1, 0))[None]
    return F.conv1d(padded, taps_CK[:, None], bias_C, groups=len(taps_CK))[0].T
