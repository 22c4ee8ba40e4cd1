"""`allstep verify`: options, runs, and what a person reads."""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from allstep.cli.verify.causes import Evidence, likely_cause
from allstep.cli.verify.compare import Difference, first_difference, steps_in_both
from allstep.cli.verify.runs import NotVerified, Script, run_script
from allstep.cli.verify.words import described, replayed, verdict
from allstep.launch.spec import cores_available
from allstep.report.ledger import LEDGER_FOLDER, LedgerStep, read_ledger
from allstep.trainer.verification import Verification

__all__ = ["verify"]

Steps = Mapping[int, LedgerStep]


def _underscored(name: str) -> str:
    return name.replace("-", "_")


def _sizes(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        sizes = [int(each) for each in value.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise click.BadParameter(f"{value!r}: expected numbers of ranks, such as 1,2,4.")
    return sizes


@click.command(
    context_settings={"allow_interspersed_args": False, "token_normalize_func": _underscored},
    options_metavar="[OPTIONS]",
)
@click.option("--world_sizes", default="1,2,4", show_default=True, callback=_sizes, metavar="N,N", help="Ranks to compare.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, metavar="S", help="Optimizer steps to compare.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0.0),
    default=0.0,
    metavar="X",
    help="Relative difference of losses and norms that is none, for devices; tensors are then not compared. Default: none.",
)
@click.option(
    "--replay",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Run a step of the run in DIR again, in one process, and compare; DIR is its output folder, with a ledger.",
)
@click.option("--step", type=click.IntRange(1), metavar="T", help="The step to replay.")
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR DIR",
    help="Compare the ledgers of two runs; no script is run.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as for `python -m`.")
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def verify(
    world_sizes: list[int],
    steps: int,
    tolerance: float,
    replay: Path | None,
    step: int | None,
    compare: tuple[Path, Path] | None,
    module: bool,
    script: str | None,
    args: tuple[str, ...],
) -> None:
    """Does SCRIPT, with its ARGS, do the same on 1, 2 and 4 ranks? If not, from which step on, in what, and why?

    The script, which uses allstep's Trainer, is run as it is at each world size, with the same global batch: what it asks for
    on the largest of them. Each run is stopped after some steps, and writes to a temporary folder. Samples, inputs, losses,
    gradients and weights of each step are compared.

    \b
    allstep verify train.py --learning_rate 3e-4
    allstep verify --world_sizes 1,8 --steps 50 train.py
    allstep verify --replay output --step 1200 train.py
    allstep verify --compare output_a output_b

    Exit status: 0 where all is the same, 1 where something differs, 2 where it could not be found out.
    """
    if compare is not None:
        sys.exit(_compare(*compare, tolerance))
    if script is None:
        raise click.UsageError("Missing argument 'SCRIPT'. (Only --compare does without.)")
    if not module and not os.path.isfile(script):
        raise click.UsageError(f"SCRIPT {script!r} is not there: looked for {os.path.abspath(script)}.")
    subject = Script(name=script, is_module=module, args=args)
    with tempfile.TemporaryDirectory(prefix="allstep-verify-") as folder:
        if replay is None:
            sys.exit(_verify(subject, world_sizes, steps, tolerance, Path(folder)))
        if step is None:
            raise click.UsageError("--replay needs --step T, the step to run again.")
        sys.exit(_replay(subject, replay, step, tolerance, Path(folder)))


def _verify(script: Script, sizes: Sequence[int], steps: int, tolerance: float, folder: Path) -> int:
    largest = max(sizes)
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores_available() // largest))
    click.echo(f"allstep verify: {script.name} for {steps} steps on {', '.join(map(str, sizes))} rank(s)")
    runs = 0

    def run(ranks: int) -> Steps:
        nonlocal runs
        runs += 1
        asked = Verification(output_dir=str(folder / f"run-{runs}"), steps=steps, ranks=largest)
        return run_script(script, ranks, asked, threads)

    first = run(sizes[0])
    for size in sizes[1:]:
        other = run(size)
        difference = _difference(first, other, tolerance, f"{size} rank(s)")
        if difference is not None:
            click.echo("  they differ; the same once more, to tell what is random from what depends on ranks")
            is_random = first_difference(other, run(size), tolerance) is not None
            _tell(difference, first, other, is_random, f"{sizes[0]} rank(s)", f"{size} rank(s)")
            return 1
    click.echo(verdict(first, sizes, tolerance))
    return 0


def _difference(first: Steps, other: Steps, tolerance: float, whose: str) -> Difference | None:
    difference = first_difference(first, other, tolerance)
    if difference is None and first.keys() != other.keys():
        raise NotVerified(
            f"The first run has the steps 1 to {max(first)}, that on {whose} those from 1 to {max(other)}; as far as both go "
            f"they are the same. Look for what ends training: max_steps or epochs that the script computes from the world "
            f"size, or a callback that stops on some ranks."
        )
    return difference


def _tell(difference: Difference, first: Steps, other: Steps, is_random: bool | None, here: str, there: str) -> None:
    evidence = Evidence(here=first[difference.step], there=other[difference.step], is_random=is_random)
    click.echo(described(difference, here, there))
    click.echo(f"Likely cause: {likely_cause(difference, evidence)}")


def _compare(here: Path, there: Path, tolerance: float) -> int:
    ours, theirs = (_ledger_of(folder) for folder in (here, there))
    both = steps_in_both(ours, theirs)
    if not both:
        raise NotVerified(
            f"{here} has the steps {min(ours)} to {max(ours)}, {there} {min(theirs)} to {max(theirs)}: none in common to "
            f"compare. Give two runs that overlap."
        )
    difference = first_difference(ours, theirs, tolerance)
    if difference is None:
        click.echo(f"identical: steps {both[0]} to {both[-1]} ({len(both)}), as far as both ledgers tell")
        return 0
    _tell(difference, ours, theirs, None, str(here), str(there))
    return 1


def _replay(script: Script, recorded: Path, step: int, tolerance: float, folder: Path) -> int:
    ledger = _ledger_of(recorded)
    if step not in ledger:
        raise NotVerified(f"{recorded} has no step {step}; its ledger holds {min(ledger)} to {max(ledger)}. Give one of these.")
    start = _checkpoint_before(recorded, step)
    where = "the start" if start is None else str(start)
    click.echo(f"allstep verify: step {step} of {recorded} in one process, from {where}")
    asked = Verification(
        output_dir=str(folder / "replay"),
        steps=step,
        micro_batches=ledger[step].world_size * ledger[step].block,
        resume_from=None if start is None else str(start),
    )
    steps = run_script(script, 1, asked, ledger[step].threads)
    before = {number: each for number, each in ledger.items() if number <= step}
    difference = first_difference(before, steps, tolerance)
    if difference is None and step in steps:
        click.echo(replayed(ledger[step], steps[step]))
        return 0
    if difference is None:
        raise NotVerified(f"The replay ended before step {step}, after {max(steps)}.")
    _tell(difference, before, steps, None, "the run", "the replay")
    return 1


def _checkpoint_before(folder: Path, step: int) -> Path | None:
    numbered = [(int(path.name.rpartition("-")[2]), path) for path in folder.glob("checkpoint-*") if _is_number(path.name)]
    return max((pair for pair in numbered if pair[0] < step), default=(0, None))[1]


def _is_number(name: str) -> bool:
    return name.rpartition("-")[2].isdecimal()


def _ledger_of(folder: Path) -> Steps:
    try:
        steps = read_ledger(folder / LEDGER_FOLDER)
    except FileNotFoundError as error:
        raise NotVerified(str(error)) from None
    if not steps:
        raise NotVerified(
            f"The ledger in {folder} holds no step that all ranks have written: the run ended before its first one was done."
        )
    return steps
