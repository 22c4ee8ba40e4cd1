"""`allstep launch`: options to a `LaunchSpec`, and the report of how it ended."""

import os
import sys

import click

from allstep.errors import AllstepError
from allstep.launch.spec import LaunchSpec, cores_available, default_num_processes, visible_gpus

__all__ = ["launch"]


def _underscored(name: str) -> str:
    return name.replace("-", "_")


@click.command(
    context_settings={"allow_interspersed_args": False, "token_normalize_func": _underscored},
    options_metavar="[OPTIONS]",
)
@click.option("--num_processes", type=int, metavar="N", help="Ranks to start. Default: one per visible GPU, else 1.")
@click.option(
    "--num_cpu_threads_per_process",
    type=int,
    metavar="T",
    help="CPU threads of each rank. Default: OMP_NUM_THREADS, else the cores of this job divided by its ranks.",
)
@click.option(
    "--main_process_port",
    type=int,
    default=0,
    metavar="P",
    help="Port on which rank 0 meets the others. Default: a free one.",
)
@click.option(
    "--log_dir",
    metavar="DIR",
    help="Keep the output of the ranks other than 0 here. Default: a private folder, kept only after a failure.",
)
@click.option(
    "--grace_period",
    type=float,
    default=10.0,
    show_default=True,
    metavar="S",
    help="Seconds a rank has to end after SIGTERM before it is killed.",
)
@click.option("--num_machines", type=int, default=1)
@click.option("--machine_rank", type=int, default=0)
@click.option("--main_process_ip")
@click.option("--max_restarts", type=int, default=0)
@click.option("--monitor_interval", type=float, default=1.0)
@click.option("--tee", is_flag=True)
@click.option("--run_id")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as for `python -m`.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(
    num_processes: int | None,
    num_cpu_threads_per_process: int | None,
    main_process_port: int,
    log_dir: str | None,
    grace_period: float,
    num_machines: int,
    machine_rank: int,
    main_process_ip: str | None,
    max_restarts: int,
    monitor_interval: float,
    tee: bool,
    run_id: str | None,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run the Python script SCRIPT on several ranks of this machine, with its ARGS.

    Options of allstep come before SCRIPT, with underscores or dashes; all that follows SCRIPT is left to the script.
    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, so that
    any program that uses torch.distributed runs. Rank 0 has this terminal; the output of the others goes to files, and is
    shown when they fail. When a rank fails, the others are stopped, and the end tells which failed first, where and why.
    Ranks on the CPU keep freed memory for the next step (glibc's malloc), unless you set any MALLOC_ variable.

    \b
    Exit status: 0; that of the rank that failed first (128 + N where signal N killed it); 130 after Ctrl-C.

    \b
    allstep launch --num_processes 2 train.py --learning_rate 3e-4
    allstep launch --num_processes 2 -m my_package.train
    """
    _refuse_nesting()
    _find(script, module)
    try:
        spec = LaunchSpec(
            script=script,
            module=module,
            args=args,
            num_processes=_default_ranks() if num_processes is None else num_processes,
            num_cpu_threads_per_process=num_cpu_threads_per_process,
            main_process_port=main_process_port,
            log_dir=log_dir,
            grace_period=grace_period,
            num_machines=num_machines,
            machine_rank=machine_rank,
            main_process_ip=main_process_ip,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            tee=tee,
            run_id=run_id,
        )
        from allstep.launch.agent import launch as run

        result = run(spec)
    except AllstepError as error:
        raise click.UsageError(str(error)) from None
    from allstep.launch.failures import report  # not before the ranks have started

    if text := report(result, os.getcwd()):
        click.echo(text, err=True)
    sys.exit(result.exit_code)


def _default_ranks() -> int:
    gpus = visible_gpus(os.environ)
    if gpus == 0:
        cores = cores_available()
        click.echo(
            f"allstep: no GPU in sight, so 1 rank on the CPU, which has {cores} core{'s' if cores > 1 else ''} for this job. "
            f"For more ranks: allstep launch --num_processes {max(2, cores)} ...",
            err=True,
        )
    return default_num_processes(gpus)


def _find(script: str, module: bool) -> None:
    """Refuse a script that is not there before anything starts. Modules are looked for by the ranks."""
    if module or os.path.isfile(script):
        return
    if os.path.isdir(script):
        raise click.UsageError(f"SCRIPT {script!r} is a folder; expected a Python file. To run a package, use -m NAME.")
    hint = f" Did you mean `-m {script}`?" if not script.endswith(".py") and os.sep not in script else ""
    raise click.UsageError(f"SCRIPT {script!r} is not there: looked for {os.path.abspath(script)}.{hint}")


def _refuse_nesting() -> None:
    if os.environ.get("ALLSTEP_RUN_ID") and os.environ.get("RANK"):
        raise click.UsageError(
            f"This is rank {os.environ['RANK']} of another `allstep launch` already; each of its ranks would start ranks of "
            "its own. Launch once, from outside, or unset ALLSTEP_RUN_ID where this is meant."
        )
