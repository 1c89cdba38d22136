"""`unified-models rl` with train.processes above 1: the recipe, its trainer cut over processes."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from unified_models.adapters.fsdp.trainer import ShardedTrainer
from unified_models.arguments import assignments
from unified_models.rl.command import follow
from unified_models.rl.config import Config, read_config
from unified_models.rl.recipe import load_start
from unified_models.rl.storage import Storage
from unified_models.rl.trainer import Trainer


@contextmanager
def training(config: Config, folder: Path) -> Iterator[Trainer | None]:
    """The trainer that a config asks for; None: the recipe's own, in this process."""
    if config.train.processes == 1:
        yield None
        return
    load_start(config, folder)  # refused here, and made before several processes look for it
    with closing(ShardedTrainer(config, folder)) as trainer:
        yield trainer


def main(arguments: Sequence[str]) -> int:
    """CONFIG [KEY=VALUE ...]: what the command line hands on. 1: a check failed; 2: the input is wrong, or a training
    process failed."""
    file, *changes = arguments
    try:
        config = read_config(file, assignments(changes))
        with training(config, Storage(config.out, config).folder) as trainer:
            passed = follow(config, Console(), trainer=trainer)
    except (ValueError, OSError, RuntimeError) as error:
        Console(stderr=True, soft_wrap=True).print(Text(str(error), style="red"))
        return 2
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
