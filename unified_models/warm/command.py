"""`unified-models warm`: its arguments. What is heavy is imported when it runs."""

from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console


def warm(
    path: Annotated[
        Path, typer.Argument(metavar="DIR|CONFIG", help="A checkpoint folder, or a config.json.")
    ],
    tokens: Annotated[
        int, typer.Option(min=1, help="The most in a step: vLLM's max_num_batched_tokens.")
    ] = 8192,
    processes: Annotated[
        int | None, typer.Option(min=1, help="At a time.", show_default="as many as cores")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Show the products and stop; needs no GPU.")
    ] = False,
) -> None:
    """Compile DeepGEMM's kernels before a model is served.

    DeepGEMM compiles a kernel, for seconds each, when a step has a number of tokens that asks for a tile which it has
    not compiled yet; a server stalls for minutes, one kernel after the other. This compiles them all at once, in
    processes side by side, on the GPU that will serve. They lie in DeepGEMM's cache (DG_JIT_CACHE_DIR;
    release 2.5 without it: ~/.deep_gemm), where every later process with the same release finds them.

    Reads config.json and the headers of tensors; which formats a folder without tensors has, its config implies.

    Example: unified-models warm /models/v4-flash --tokens 16384

    Example: unified-models warm configs/deepseek_v4_flash.json --list
    """
    from unified_models.warm.compiling import warm as compile_all
    from unified_models.warm.products import described, products

    console = Console(soft_wrap=True, highlight=False)
    found = products(described(path))
    if listed:
        for product in found:
            console.print(str(product))
    else:
        began = perf_counter()
        compile_all(found, tokens, processes)
        console.print(
            f"{path}: {len(found)} products, up to {tokens} tokens, in {perf_counter() - began:.1f} s"
        )
