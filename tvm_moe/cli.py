"""The command line: ``tvm-moe``, or ``python -m tvm_moe``. Each command imports what it needs when it runs.

Exit codes: 0 all is well; 1 a check failed; 2 the input is wrong, with one line on stderr that says how.
"""

from __future__ import annotations

import json
import re
import warnings
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .errors import MoEError


class Commands(TyperGroup):
    """What all commands share: bad input ends in one line, warnings are one line, ``--json`` may stand alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_json_value(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_, **__: typer.echo(f"note: {message}", err=True)
                return super().invoke(ctx)
        except MoEError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Fused Mixture-of-Experts layers for CPUs in INT8 and BF16.",
)
Json = Annotated[
    str | None, typer.Option("--json", metavar="[FILE]", help="Write the results there; - or nothing after it: stdout.")
]
Isa = Annotated[str | None, typer.Option(help="CPU level to run, an error if this CPU lacks it. Default: the best.")]
Threads = Annotated[int | None, typer.Option(min=1, max=4096, help="Default: as many as torch uses.")]


class Dtype(StrEnum):
    bf16 = "bf16"
    int8 = "int8"


@app.command()
def run(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors files.")],
    dtype: Annotated[Dtype | None, typer.Option(help="int8 quantizes BF16 weights. Default: as stored.")] = None,
    tokens: Annotated[int, typer.Option(min=1)] = 64,
    layers: Annotated[str | None, typer.Option(metavar="0,2,5-7", help="Default: all layers with experts.")] = None,
    isa: Isa = None,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """Run the MoE layers of a checkpoint; compare them with the reference and with eager torch."""
    from . import run_report

    name = None if dtype is None else dtype.value
    report = run_report.run(checkpoint, parse_layers(layers), name, tokens, isa, threads, to_stderr=json_file == "-")
    if json_file is not None:
        write_json(report, json_file)
    raise typer.Exit(0 if report["passed"] else 1)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a model that transformers can load.")],
    prompt: Annotated[str, typer.Option(help="Text to continue, greedily.")],
    dtype: Annotated[Dtype, typer.Option(help="Of the experts; int8 quantizes BF16 weights.")] = Dtype.bf16,
    new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    compare: Annotated[
        str | None,
        typer.Option(metavar="grouped_mm", help="Also transformers' own experts, in BF16 and on a model of its own."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side, in turns; medians are shown.")] = 3,
    held_out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also the bits per byte of this text.")] = None,
    isa: Isa = None,
    threads: Threads = None,
    json_file: Json = None,
) -> None:
    """Generate text with a transformers model whose experts run here; show speed and memory."""
    from . import generate_report

    made = generate_report.run(
        model, dtype.value, prompt, new_tokens=new_tokens, compare=compare, rounds=rounds, held_out=held_out, isa=isa,
        threads=threads, to_stderr=json_file == "-",
    )  # fmt: skip
    if json_file is not None:
        write_json(made, json_file)


@app.command()
def show_config(json_file: Json = None) -> None:
    """CPU, features, chosen and rejected levels with reasons, modules, threads, versions."""
    import torch  # noqa: F401  (its OpenMP threads are what calls will run on)

    from . import report

    if json_file is None:
        text = report.explain()
        typer.echo(text)
        raise typer.Exit(1 if text.startswith(report.NOTHING_RUNS) else 0)
    write_json(report.configuration(), json_file)


@app.command()
def build(
    out: Annotated[Path, typer.Option(help="Folder for the modules; TVM_MOE_MODULES=FOLDER serves them.")],
    isa: Annotated[list[str] | None, typer.Option(help="Level to build, repeatable. Default: all of them.")] = None,
    arch: Annotated[
        str | None,
        typer.Option("--arch", "--mtriple", help="x86_64, aarch64, or a triple of it. Default: this machine's."),
    ] = None,
    tuned: Annotated[bool, typer.Option("--tuned", help="Also those with the decisions of all tune logs.")] = False,
    json_file: Json = None,
) -> None:
    """Build kernel modules, for levels this CPU lacks too."""
    from . import modules, tuning

    logs = tuning.all_logs() if tuned else []
    arch = arch and re.sub("-(unknown-)?linux-gnu$", "", arch)
    made = [str(path) for path in modules.build_all(out, isa, arch, lambda path: typer.echo(path, err=True), logs)]
    if json_file is not None:
        write_json(made, json_file)


@app.command()
def tune(
    model: Annotated[list[str] | None, typer.Option(metavar="NAME,...", help="Default: qwen3-30b-a3b.")] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="H,I,E,k", help="Another layer, repeatable.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="The layers of this checkpoint, too.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(metavar="int8,bf16", help="Default: both.")] = None,
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="Of each task; those of an earlier run count.")] = 32,
    threads: Threads = None,
    isa: Isa = None,
    out: Annotated[Path | None, typer.Option(help="Default: tune_logs/<cpu>.")] = None,
    count_instructions: Annotated[
        str | None,
        typer.Option(
            metavar="CPU", help="For neoverse-v1, -n2 or -v2 instead of this CPU, by instructions executed under qemu."
        ),
    ] = None,
    json_file: Json = None,
) -> None:
    """Search the schedules' decisions on this CPU; a decision is kept where it beats the default. Can be resumed."""
    from . import tune_command

    made = tune_command.tune(
        model or (), shape or (), checkpoint, dtype or (), trials, threads, isa, out, count_instructions,
        to_stderr=json_file == "-",
    )  # fmt: skip
    if json_file is not None:
        write_json(made, json_file)


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(help="Module files (.so), or folders of them.")],
    json_file: Json = None,
) -> None:
    """Run every kernel of a module file against the reference on this CPU."""
    from . import verify as verification

    rows = []
    for file in verification.module_files(files, lambda why: typer.echo(f"skip {why}", err=True)):
        for c in verification.verify(file):
            mark = "ok  " if c.passed else "FAIL"
            typer.echo(f"{mark} {file.name}: {c.what}: error {c.error:.3g}, bound {c.bound:.3g}", err=True)
            rows.append({"file": str(file), "what": c.what, "error": c.error, "bound": c.bound, "passed": c.passed})
    if json_file is not None:
        write_json(rows, json_file)
    raise typer.Exit(0 if all(row["passed"] for row in rows) else 1)


@app.command()
def bench(
    model: Annotated[list[str] | None, typer.Option(metavar="NAME,...", help="Default: qwen3-30b-a3b.")] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="H,I,E,k", help="Another layer, repeatable.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(metavar="int8,bf16", help="Default: both.")] = None,
    tokens: Annotated[list[str] | None, typer.Option(metavar="1,16,64,256,1024", help="Default: these.")] = None,
    routing: Annotated[list[str] | None, typer.Option(metavar="uniform,zipf,hot", help="Default: uniform.")] = None,
    peers: Annotated[list[str] | None, typer.Option(metavar="zentorch,vllm,torch,hf", help="Default: none.")] = None,
    threads: Threads = None,
    isa: Isa = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer token counts and rounds: under five minutes.")] = False,
    pack: Annotated[bool, typer.Option("--pack", help="Also the speed and the memory of packing.")] = False,
    overheads: Annotated[bool, typer.Option("--overheads", help="Also fixed costs: import, load, calls.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also a picture (.png, .svg, .pdf): cells under the roofline.")
    ] = None,
    beside_torch: Annotated[
        bool,
        typer.Option(
            "--beside-torch", help="Instead: a layer between torch matmuls, against each alone; 16,256 tokens."
        ),
    ] = False,
    arm_instructions: Annotated[
        bool,
        typer.Option(
            "--arm-instructions",
            help="Instead: instructions that one small AArch64 layer executes under qemu, beside vLLM's.",
        ),
    ] = False,
    simulate_threads: Annotated[
        list[str] | None,
        typer.Option(
            metavar="8,96,...", help="Instead: how evenly work fills so many threads; 1024 tokens, all routings."
        ),
    ] = None,
    simulate_costs: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=X,...", help="One thread: peak (GOPS), memory, cache (GB/s), item (us) of bench/costs.py."
        ),
    ] = None,
    json_file: Json = None,
) -> None:
    """Time layers beside peers and beside what this machine can do at most; check every output.

    Lists take commas or the option again.
    """
    from .bench import command, run
    from .bench import plot as plots

    options = command.parse(
        model=model or (), shapes=shape or (), dtype=dtype or (), tokens=tokens or (), routings=routing or (),
        peers=peers or (), threads=threads, isa=isa, quick=quick, pack=pack, overheads=overheads,
        plot=plot, beside_torch=beside_torch, arm_instructions=arm_instructions,
        simulate_threads=simulate_threads or (), simulate_costs=simulate_costs,
    )  # fmt: skip
    report = command.bench(options, to_stderr=json_file == "-")
    if json_file is not None:
        write_json(report, json_file)
    if plot is not None:
        plots.draw(report, plot)
    raise typer.Exit(0 if run.passed(report) else 1)


def with_json_value(args: list[str]) -> list[str]:
    """``--json`` that is last or before another option becomes ``--json=-``: typer has no optional values."""
    alone = [a == "--json" and b.startswith("-") and b != "-" for a, b in pairwise([*args, "--"])]
    return [f"{arg}=-" if bare else arg for arg, bare in zip(args, alone, strict=True)]


def parse_layers(text: str | None) -> list[int] | None:
    """``"0,2,5-7"`` to ``[0, 2, 5, 6, 7]``."""
    if text is None:
        return None
    try:
        ends = [[int(number) for number in part.split("-")] for part in text.split(",")]
        ranges = [range(first, (*last, first)[0] + 1) for first, *last in ends]
        if not all(0 < len(each) <= 10_000 for each in ranges):
            raise ValueError("a range that ends before it begins, or never")
        return [i for each in ranges for i in each]
    except ValueError:
        raise MoEError(f"--layers is {text!r}, expected numbers and ranges such as 0,2,5-7") from None


def write_json(value: Any, target: str) -> None:
    """To the file ``target``, or to stdout for "-"; NaN and Inf, which JSON lacks, become null."""
    strict = json.loads(json.dumps(value), parse_constant=lambda _: None)
    text = json.dumps(strict, indent=2)
    if target == "-":
        typer.echo(text)
        return
    try:
        Path(target).write_text(text + "\n")
    except OSError as error:
        raise MoEError(f"--json {target}: cannot be written ({error.strerror}); give another file") from None
