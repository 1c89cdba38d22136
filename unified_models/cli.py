"""The command line: arguments in, tables or JSON out. Everything heavy is imported inside the command that needs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from unified_models.warm.command import warm

FAILED, REFUSED = 1, 2  # exit status: a check found unequal bits; the input is wrong
WIDTH = 140  # columns of tables that go to a file or a pipe


def screen() -> Console:
    """Where tables go: as wide as the terminal, or as COLUMNS says."""
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if fixed else WIDTH)


class Commands(TyperGroup):
    """Wrong input ends in one red line and exit status 2; --debug, anywhere on the line, shows the traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Let --debug stand after the command, too."""
        rest = [arg for arg in args if arg != "--debug"]
        return super().parse_args(ctx, (["--debug"] if len(rest) < len(args) else []) + rest)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if ctx.params["debug"]:
                raise
            Console(stderr=True, soft_wrap=True).print(Text(str(error), style="red"))
            raise typer.Exit(REFUSED) from None


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint folder.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write JSON, too.")]
Seed = Annotated[int, typer.Option(help="Of all random numbers.")]
Numerics = Annotated[
    str, typer.Option(help="deployed: the checkpoint's formats; float32: nothing is quantised.")
]
Threads = Annotated[int, typer.Option(min=1, help="Of torch; the bits do not depend on it.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another value (JSON).")
]
Architectures = Annotated[
    list[str] | None,
    typer.Option("--architecture", help="Of this one only; repeat for several."),
]


@app.callback()
def start(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """One file an architecture, rollout model and training module at once, with bit-identical logprobs.

    Start with **unified-models demo**. Every command explains itself: unified-models verify --help
    """


@app.command()
def demo(
    architecture: Architectures = None,
    samples: Annotated[int, typer.Option(help="Rollouts of each prompt.")] = 4,
    tokens: Annotated[int, typer.Option(help="Sampled in the longest rollout.")] = 24,
    updates: Annotated[int, typer.Option(help="Policy-gradient updates.")] = 2,
    lr: Annotated[float, typer.Option(help="Of AdamW, on float32 masters.")] = 3e-3,
    numerics: Numerics = "deployed",
    threads: Threads = 1,
    seed: Seed = 0,
) -> None:
    """The promise, shown on a tiny model.

    Makes a tiny checkpoint, samples from it, updates its weights by policy gradient, and samples again. One row a
    rollout: how many of the sampled tokens' logprobs have other bits in the training forward (none), and what the
    same model file gives under plain torch operators whose order of summation follows the shape of the batch. Exit
    status 1 if a bit differs.

    Example: unified-models demo --updates 4 --seed 1
    """
    from tempfile import TemporaryDirectory

    import torch

    from unified_models import registry
    from unified_models.demo import Demo, Settings, opening, run

    torch.set_num_threads(threads)
    console, ok = screen(), True
    settings = Settings(samples, tokens, updates, lr, seed, numerics)
    for name in architecture or registry.architectures():
        console.print(opening(name, settings), highlight=False)
        with TemporaryDirectory() as folder:
            shown = Demo(name, list(run(name, Path(folder) / name, settings)))
        console.print(shown.table())
        console.print(shown.story(), highlight=False)
        ok = ok and shown.ok
    if not ok:
        raise typer.Exit(FAILED)


@app.command()
def tiny(
    name: Annotated[str, typer.Argument(help="An architecture.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A config.json to start from; default: the smallest."),
    ] = None,
    changes: Changes = None,
    seed: Seed = 0,
) -> None:
    """Make a small random checkpoint: every part of the architecture, official tensor names, any machine's bytes.

    In configs/tiny/ are others than the smallest: number formats as released (nemotron_h_mixed.json), experts in a
    latent space (nemotron_h_latent.json), long chunks (nemotron_h_q128.json), and more.

    Example: unified-models tiny deepseek_v4 /tmp/v4 --set num_hidden_layers=4 --set expert_dtype=null

    Example: unified-models tiny nemotron_h /tmp/nemotron --config configs/tiny/nemotron_h_mixed.json
    """
    from unified_models.arguments import assignments
    from unified_models.tiny import write_tiny

    write_tiny(name, folder, dict(assignments(changes or [])), seed=seed, config=config)
    size = sum(path.stat().st_size for path in folder.iterdir())
    Console(soft_wrap=True).print(f"{folder}: {name}, {size / 1e6:.1f} MB", highlight=False)


@app.command()
def inspect(
    folder: Folder,
    values: Annotated[
        bool, typer.Option(help="Also read the tensors, and say which of them packing changes.")
    ] = True,
    every: Annotated[
        bool, typer.Option("--every", help="One line a tensor instead of one a kind.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(metavar="vllm", help="The caches and weights that it would have there."),
    ] = None,
) -> None:
    """What a checkpoint holds, what reads each tensor, and which values rounding would change.

    Reads one tensor at a time, so any size will do. Exit status 1 if the checkpoint would not load.

    Example: unified-models inspect /tmp/v4 --no-values
    """
    from unified_models.checkpoint import describe, print_report
    from unified_models.outside import run_adapter

    if engine is not None:
        if engine != "vllm":
            raise ValueError(f"--engine {engine!r}; known: vllm")
        raise typer.Exit(run_adapter("vllm.report", folder))
    report = describe(folder, values=values)
    print_report(report, screen(), every_tensor=every)
    if report.problems:
        raise typer.Exit(FAILED)


@app.command()
def generate(
    folder: Folder,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar='"ID ID ..."', help="Token ids; repeat for several prompts."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help='One prompt a line: [1, 2] or {"prompt": [1, 2]}.'),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Sampled for each prompt.")] = 16,
    temperature: Annotated[float, typer.Option(help="0 is greedy, reported at 1.")] = 1.0,
    seed: Seed = 0,
    stop: Annotated[list[int] | None, typer.Option(metavar="ID", help="Ends a sample.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt.")] = False,
    prefix_cache: Annotated[
        bool, typer.Option(help="Reuse what equal beginnings have in memory.")
    ] = True,
    cache_tokens: Annotated[int, typer.Option(help="Memory of all running sequences.")] = 4096,
    step_tokens: Annotated[int, typer.Option(help="Run in one step.")] = 64,
    max_sequences: Annotated[int, typer.Option(help="Run in one step.")] = 16,
    state_slots: Annotated[
        int | None,
        typer.Option(
            help="Sequences whose scan states fit; the others wait. Of models with a scan.",
            show_default="twice max-sequences",
        ),
    ] = None,
    numerics: Numerics = "deployed",
) -> None:
    """Sample from a checkpoint, with the exact logprob of every token.

    There is no tokenizer here: prompts and samples are token ids.

    Example: unified-models generate /tmp/v4 --prompt "1 2 3" --prompt "4 5" --max-tokens 8 --json
    """
    from unified_models import samples
    from unified_models.arguments import prompts_of, token_ids
    from unified_models.checkpoint import load
    from unified_models.engine import Engine, Sampling

    given = [*map(token_ids, prompt or []), *(prompts_of(prompts) if prompts else [])]
    if not given:
        raise ValueError("nothing to generate from: give --prompt or --prompts")
    sampling = Sampling(max_tokens, temperature, seed, stop_ids=tuple(stop or ()))
    model = load(folder, numerics=numerics)
    sizes = (cache_tokens, step_tokens, max_sequences, prefix_cache)
    engine = Engine(model, *sizes, state_slots=state_slots)
    outs = engine.generate(given, sampling)
    if as_json:
        for ids, out in zip(given, outs, strict=True):
            print(json.dumps(samples.record(ids, out)))
        return
    screen().print(samples.table(given, outs))
    Console(stderr=True, soft_wrap=True).print(samples.work(engine.stats), highlight=False)


@app.command()
def verify(
    folder: Folder,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="transformers|vllm",
            help="transformers: another implementation, by tolerance; vllm: our own in real vLLM, bit for bit.",
        ),
    ] = None,
    json_file: Json = None,
    numerics: Annotated[
        list[str] | None,
        typer.Option(help="deployed or float32; repeat for several.", show_default="both"),
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Repeat for several.", show_default="1 and 2")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="The least to compare.")] = 20000,
    quick: Annotated[bool, typer.Option("--quick", help="Short sequences, one thread.")] = False,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Every way to compute a logprob against every other, bit for bit.

    Prefill, decode, chunks, mixed packs, preemption, prefix hits, weight updates and the training forward; then a
    fault of one unit in the last place, which must be found and named. Exit status 1 if a bit differs, or if too
    little was compared.

    Example: unified-models verify /tmp/v4 --quick --json report.json
    """
    from unified_models import verify as checks
    from unified_models.outside import run_adapter

    report: checks.Report | checks.Parity
    if against is None:
        report = checks.verify_folder(
            folder,
            numerics=numerics or ("deployed", "float32"),
            threads=threads or (1, 2),
            tokens=tokens,
            seed=seed,
            quick=quick,
            device=device,
        )
    elif against == "transformers":
        report = checks.against_transformers(folder, seed=seed)
    elif against == "vllm":
        settings = numerics or ["deployed"]
        if len(settings) != 1:
            raise ValueError(f"--against vllm runs one setting of numerics, got {settings}")
        more = [json_file] if json_file else []
        raise typer.Exit(run_adapter("vllm.verify", folder, settings[0], seed, *more))
    else:
        raise ValueError(f"--against {against!r}; known: transformers, vllm")
    screen().print(report.table())
    _write(json_file, report.to_json())
    if not report.ok:
        raise typer.Exit(FAILED)


@app.command()
def bench(
    architecture: Architectures = None,
    scan: Annotated[
        bool, typer.Option("--scan", help="No models: the scan alone, decoded and by chunks.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Of each measurement; medians.")] = 5,
    rollouts: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="Real vLLM on a GPU: its class and ours.")
    ] = None,
    training: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="On a GPU: transformers' class and ours.")
    ] = None,
    changes: Changes = None,
    numerics: Numerics = "deployed",
    threads: Threads = 1,
    json_file: Json = None,
    seed: Seed = 0,
) -> None:
    """Times of work that was first shown right: decode, prefill, training, the engine's own share, its memory.

    Tiny models on the CPU. Nothing is timed before the engine's logprobs have the bits of the training forward; exit
    status 1 if they do not. With --scan: Mamba-2's scan at chunks of 16 to 256 tokens, a decoded row against a token
    of whole chunks, at tiny widths and at those of Nemotron 30B. With --rollouts: tokens a second of a whole model with
    random weights, as its config.json has it. With --training: the same of its forward and backward; --set changes keys
    of config.json, and of the load behind a dot.

    Example: unified-models bench --repeats 9 --json bench.json

    Example: unified-models bench --training config.json --set num_hidden_layers=7 --set .tokens=16384
    """
    from unified_models.bench.command import times
    from unified_models.outside import run_adapter

    if changes and not (rollouts or training):
        raise ValueError(f"--set {changes[0]!r}: it changes the CONFIG of --rollouts or --training")
    if rollouts is not None:
        more = [json_file] if json_file else []
        raise typer.Exit(run_adapter("vllm.bench", "both", rollouts, *(changes or ()), *more))
    if training is not None:
        if json_file is not None:
            raise ValueError(f"--json {json_file}: --training prints the JSON of each run")
        call = [sys.executable, "-m", "unified_models.bench.training", "both", str(training)]
        raise typer.Exit(subprocess.run([*call, *(changes or ())]).returncode)
    command = " ".join(["unified-models", *sys.argv[1:]])
    results = times(architecture, scan, repeats, numerics, threads, screen(), seed, command)
    _write(json_file, json.dumps([result.as_dict() for result in results], indent=1))
    if not all(result.ok for result in results):
        raise typer.Exit(FAILED)


@app.command()
def rl(
    paths: Annotated[list[Path], typer.Argument(metavar="CONFIG", help="Or folders of runs.")],
    changes: Changes = None,
    plot: Annotated[Path | None, typer.Option(help="Draw runs that are there, as PNG.")] = None,
) -> None:
    """GRPO on a toy task, resumable; each logprob compared with the training forward. Exit status 1 if a bit differs.

    Example: unified-models rl configs/rl/nemotron_h_arithmetic.toml --set train.lr=0
    """
    from unified_models.rl.command import draw, train

    if not (draw(paths, plot) if plot else train(paths, changes or [], screen())):
        raise typer.Exit(FAILED)


app.command()(warm)


def _write(file: Path | None, text: str) -> None:
    if file is not None:
        file.write_text(text + "\n")
        Console(stderr=True, soft_wrap=True).print(f"written: {file}", highlight=False)


def main() -> None:
    """The console script."""
    # Idle OpenMP threads that spin take their core from the others: up to ten times slower on a busy machine. libgomp
    # reads this when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app(prog_name="unified-models")
