"""`allstep bench`: measure this package against its peers on this machine."""

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from allstep import __version__
from allstep.cli.bench import picture, startup, trainers
from allstep.cli.bench.blocks import LEAST
from allstep.cli.bench.report import markdown, tables, verdict
from allstep.cli.bench.starting import machine, run_ranks

__all__ = ["bench"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 25 * MIB, 100 * MIB)
QUICK_SIZES = (4 * KIB, MIB, 25 * MIB)
MODELS = {
    "mlp32": "MLP of 8 x 1024, 8.4 M parameters, batch 32",
    "mlp128": "the same, batch 128",
    "small": "400 small tensors (200 layers of 64 x 64), 0.8 M parameters, batch 8",
    "gpt": "decoder of 6 blocks, 10.8 M parameters, 4 x 128 tokens",
    "resnet": "ResNet with BatchNorm, 0.27 M parameters, 16 pictures of 32 x 32",
    "encoder": "encoder of 6 layers, 10.6 M parameters, 4 x 64 tokens",
}
QUICK_MODELS = ("mlp32", "small", "resnet")
OPTIMIZERS = ("sgd", "adamw")


def _listed(read: Callable[[str], Any]) -> Callable[..., tuple[Any, ...] | None]:
    """What click calls to read values with commas between them, each taken once."""

    def values(_: click.Context, param: click.Parameter, text: str | None) -> tuple[Any, ...] | None:
        if text is None:
            return None
        try:
            return tuple(dict.fromkeys(read(part.strip()) for part in text.split(",")))
        except ValueError as error:
            raise click.BadParameter(f"{error} Write values with commas between them.", param=param) from None

    return values


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 32:
        raise ValueError(f"{text!r} is no number of ranks from 2 to 32.")
    return int(text)


def _any_ranks(text: str) -> int:
    return 1 if text == "1" else _ranks(text)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number from 1 on.")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*(|K|M|G)(|B|iB)", text, re.IGNORECASE)
    if not found or not int(found[1]):
        raise ValueError(f"{text!r} is no size: expected one such as 4096, 64K or 25M (K is 1024 bytes).")
    return int(found[1]) * {"": 1, "K": KIB, "M": MIB, "G": KIB * MIB}[found[2].upper()]


def _one_of(what: str, names: Any) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is no {what}; there are {', '.join(names)}.")
        return text

    return read


SHARED = (
    click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output, and nothing else there."),
    click.option(
        "--output",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Write NAME.json, NAME.md and NAME.png into this folder. Default: a picture in the working folder only.",
    ),
    click.option(
        "--seconds",
        type=click.FloatRange(min=0, min_open=True),
        metavar="S",
        help="Seconds of measuring for each row, or for all of `launch`.",
    ),
    click.option(
        "--blocks",
        type=click.IntRange(min=1),
        default=LEAST,
        show_default=True,
        metavar="N",
        help="Blocks of each side, at the least.",
    ),
    click.option("--quick", is_flag=True, help="Fewer rows and less time for each: about a minute on an idle machine."),
)


def _shared(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.reduce(lambda inner, option: option(inner), SHARED, function)


def _dashes_or_underscores(name: str) -> str:
    return name.replace("-", "_")


SETTINGS = {"token_normalize_func": _dashes_or_underscores}
BACKEND = click.option(
    "--backend",
    default="shm",
    show_default=True,
    metavar="NAME",
    help="The torch.distributed backend to test; MODULE:NAME imports MODULE first.",
)


@click.group(context_settings=SETTINGS)
def bench() -> None:
    """Measure allstep against its peers on this machine: a table, a picture, and a verdict in words.

    Sides take turns in short blocks, in the same ranks, with one thread each. What counts are ratios of medians; beside them
    are 95 % intervals. Blocks in which other processes used the cores are done again, and counted. Results are compared too.

    \b
    Exit status: 0; 1 where a result was wrong or a rank failed; never because something was slow.
    """


@bench.command(context_settings=SETTINGS)
@_shared
@BACKEND
@click.option("--ranks", callback=_listed(_ranks), default="2,4", show_default=True, metavar="N,N", help="Numbers of ranks.")
@click.option("--sizes", callback=_listed(_bytes), metavar="B,B", help="Bytes, as 64K or 25M. Default: 4K,64K,1M,4M,25M,100M.")
@click.option(
    "--dtypes",
    callback=_listed(_one_of("dtype", ("float32", "bfloat16", "float16", "float64"))),
    metavar="D,D",
    help="Default: float32,bfloat16.",
)
def allreduce(
    as_json: bool,
    output: Path | None,
    seconds: float | None,
    blocks: int,
    quick: bool,
    backend: str,
    ranks: tuple[int, ...],
    sizes: tuple[int, ...] | None,
    dtypes: tuple[str, ...] | None,
) -> None:
    """The shm backend against gloo: all_reduce, by size.

    Measured for tensors that the group allocated, which need no copy, and for any tensor. Every sum is checked.
    """
    settings = {
        "backend": backend,
        "seconds": seconds or (2.0 if quick else 12.0),
        "blocks": blocks,
        "sizes": sizes or (QUICK_SIZES if quick else SIZES),
        "dtypes": dtypes or (("float32",) if quick else ("float32", "bfloat16")),
    }
    left = [run_ranks("allreduce", world, settings)[0] for world in ranks]
    rows = [row for one in left for row in one["rows"]]
    _finish({"benchmark": "allreduce", "backend": _short(backend), "torch": left[0]["torch"], "rows": rows}, as_json, output)


@bench.command(context_settings=SETTINGS)
@_shared
@BACKEND
@click.option("--ranks", callback=_listed(_ranks), default="2,4", show_default=True, metavar="N,N", help="Numbers of ranks.")
@click.option(
    "--models", callback=_listed(_one_of("model", MODELS)), metavar="M,M", help=f"Of {', '.join(MODELS)}. Default: all."
)
@click.option(
    "--optimizers",
    callback=_listed(_one_of("optimizer", OPTIMIZERS)),
    metavar="O,O",
    help="Of sgd, adamw. Default: both.",
)
@click.option(
    "--accumulation",
    callback=_listed(_whole),
    metavar="K,K",
    help="Micro-batches of a step. Default: 1; and 8 for mlp32 with sgd on 2 ranks.",
)
def ddp(
    as_json: bool,
    output: Path | None,
    seconds: float | None,
    blocks: int,
    quick: bool,
    backend: str,
    ranks: tuple[int, ...],
    models: tuple[str, ...] | None,
    optimizers: tuple[str, ...] | None,
    accumulation: tuple[int, ...] | None,
) -> None:
    """Training steps under allstep's DDP and torch's.

    Ours runs on the shm backend and on gloo. torch's runs on gloo at its best setting: it is tried with gradient_as_bucket_view
    off and on, and with buckets of 1, 5 and 25 MB; the slow ones leave early. The floor is the same model with no
    synchronisation at all. Afterwards the weights are compared: equal bits on 2 ranks, equal gradients on more.
    """
    each = seconds or (5.0 if quick else 20.0)
    models = models or (QUICK_MODELS if quick else tuple(MODELS))
    optimizers = optimizers or (OPTIMIZERS[:1] if quick else OPTIMIZERS)
    left = []
    for world in ranks:
        plan = [(model, optimizer, steps) for steps in accumulation or (1,) for model in models for optimizer in optimizers]
        if accumulation is None and not quick and world == 2 and "mlp32" in models and "sgd" in optimizers:
            plan.append(("mlp32", "sgd", 8))
        cases = [{"model": m, "optimizer": o, "accumulation": k, "seconds": each, "blocks": blocks} for m, o, k in plan]
        left.append(run_ranks("ddp", world, {"backend": backend, "cases": cases})[0])
    result = {
        "benchmark": "ddp",
        "backend": _short(backend),
        "torch": left[0]["torch"],
        "models": {model: MODELS[model] for model in models},
        "rows": [row for one in left for row in one["rows"]],
    }
    _finish(result, as_json, output)


@bench.command(context_settings=SETTINGS)
@_shared
@click.option(
    "--ranks", callback=_listed(_any_ranks), default="1,2", show_default=True, metavar="N,N", help="Numbers of ranks."
)
@click.option(
    "--steps", type=click.IntRange(min=20), metavar="N", help="Optimizer steps of one job. Default: 600; 300 with --quick."
)
def trainer(
    as_json: bool,
    output: Path | None,
    seconds: float | None,
    blocks: int,
    quick: bool,
    ranks: tuple[int, ...],
    steps: int | None,
) -> None:
    """Steps per second under Trainers and in a bare loop.

    The model is tiny, so that what is left is the Trainer's own work: allstep's Trainer, a bare torch loop, and that of
    transformers, which is left out where it is not installed.
    """
    steps, each = steps or (300 if quick else 600), seconds or (10.0 if quick else 120.0)
    rows = [trainers.measure(world, steps=steps, seconds=each, blocks=blocks) for world in ranks]
    _finish({"benchmark": "trainer", "torch": rows[0].pop("torch"), "steps": steps, "rows": rows}, as_json, output)


@bench.command(context_settings=SETTINGS)
@_shared
def launch(as_json: bool, output: Path | None, seconds: float | None, blocks: int, quick: bool) -> None:
    """Start of two ranks under each launcher; imports.

    Timed until the first all_reduce is done: under allstep launch, torchrun, and as bare processes, which are the floor.
    """
    result = startup.measure(seconds=seconds or (20.0 if quick else 120.0), blocks=blocks, imports=3 if quick else 9)
    _finish({"benchmark": "launch", **result}, as_json, output)


def _short(backend: str) -> str:
    return backend.rpartition(":")[2]


def _finish(result: dict[str, Any], as_json: bool, output: Path | None) -> None:
    """Say and write the result; the exit status is 1 where it was wrong."""
    result = {"allstep": __version__, "machine": machine(), **result}
    result["wrong"] = [text for row in result["rows"] for text in row.get("wrong", ())]
    result["verdict"] = verdict(result)
    name = result["benchmark"]
    if not as_json:
        click.echo(f"{tables(result)}\n\n{result['verdict']}")
    folder = output or (None if as_json else Path())
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (output / f"{name}.md").write_text(markdown(result))
    if folder is not None and not result["wrong"]:
        if picture.is_available():
            path = folder / (f"{name}.png" if output else f"allstep-bench-{name}.png")
            picture.draw(result, path)
            click.echo(f"picture: {path}", err=True)
        else:
            click.echo(picture.HOW_TO_GET, err=True)
    if as_json:
        click.echo(json.dumps(result))
    if result["wrong"]:
        for text in result["wrong"]:
            click.echo(f"Error: {text}", err=True)
        sys.exit(1)
