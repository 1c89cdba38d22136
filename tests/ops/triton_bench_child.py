"""In Triton's interpreter: what `bench.kernels` times, at tiny sizes, has the same bits alone and among others."""

import torch

from unified_models.bench import kernels
from unified_models.models import nemotron_h
from unified_models.verify.compare import bits


def main() -> None:
    torch.manual_seed(0)
    kernels.OPEN = 5
    cfg, count = nemotron_h.Config.tiny(), 0
    for make in (kernels.experts, kernels.scan):
        whole, alone, moved = make(cfg, 6, "cpu")
        told = bits([whole()[-1:].float()], [alone().float()])
        assert not told.unequal and moved > 0, make.__name__
        count += told.compared
    print(f"{count} values agree")


if __name__ == "__main__":
    main()
