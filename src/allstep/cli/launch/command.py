"""`allstep launch`: options to a `LaunchSpec`, and the report of how it ended."""

import os
import sys
from collections.abc import Mapping

import click

from allstep.cli.launch.describe import described
from allstep.cli.launch.options import LaunchCommand, setting_options
from allstep.devices import kind_here
from allstep.environment import started_by_scheduler
from allstep.errors import AllstepError
from allstep.launch.config_file import CONFIG_FILE, read_config_file
from allstep.launch.foreign import WITHOUT_EFFECT
from allstep.launch.plan import (
    Machine,
    Program,
    elastic_command,
    elastic_variables,
    is_elastic,
    machines_of,
    spec_of,
    variables_of,
)
from allstep.launch.settings import DEFAULT, Plain, Value, resolve
from allstep.launch.spec import cores_available, visible_gpus
from allstep.launch.variables import glibc_version

__all__ = ["launch"]


def _underscored(name: str) -> str:
    return name.replace("-", "_")


@click.command(
    cls=LaunchCommand,
    context_settings={"allow_interspersed_args": False, "token_normalize_func": _underscored},
    options_metavar="[OPTIONS]",
)
@setting_options
@click.option("--config_file", metavar="FILE", help=f"Read settings from accelerate's YAML, or JSON. Default: ${CONFIG_FILE}.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as for `python -m`.")
@click.option("--no_python", is_flag=True, help="SCRIPT is a program of its own, not to be run by Python.")
@click.option(
    "--print_config", "--dry_run", is_flag=True, help="Show each setting with where it comes from, and start nothing."
)
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(
    config_file: str | None,
    module: bool,
    no_python: bool,
    print_config: bool,
    script: str | None,
    args: tuple[str, ...],
    **flags: Plain,
) -> None:
    """Run the Python script SCRIPT on several ranks of this machine, or of several machines, with its ARGS.

    Options of allstep come before SCRIPT, with underscores or dashes; all that follows SCRIPT is left to the script. The
    words of torchrun and accelerate are understood. A setting comes from its flag, else from its variable (ALLSTEP_ and
    its name in capitals, then torchrun's or accelerate's own), else from the configuration file.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, so that
    any program that uses torch.distributed runs. Rank 0 has this terminal; the output of the others goes to files, and is
    shown when they fail. When a rank fails, the others are stopped, and the end tells which failed first, where and why.
    Ranks on the CPU keep freed memory for the next step (glibc's malloc), unless you set any MALLOC_ variable.

    \b
    Exit status: 0; that of the rank that failed first (128 + N where signal N killed it); 130 after Ctrl-C.

    \b
    allstep launch --num_processes 2 train.py --learning_rate 3e-4
    allstep launch --num_processes 2 -m my_package.train
    allstep launch --nnodes 2 --nproc_per_node 8 --node_rank 0 --master_addr node1 train.py
    """
    try:
        resolved = resolve(flags, os.environ, *_from_file(config_file or os.environ.get(CONFIG_FILE) or None))
        kind = kind_here()
        machine = Machine(gpus=visible_gpus({**os.environ, **variables_of(resolved, kind)}), cores=cores_available())
        _tell_without_effect(flags)
        if print_config:
            click.echo(_table(described(resolved, machine)))
            return
        if script is None:
            raise click.MissingParameter(param_type="argument", param_hint="'SCRIPT'")
        _refuse_nesting(resolved)
        program = Program(script=script, module=module, no_python=no_python, args=args)
        _find(program)
        if is_elastic(resolved):
            added = variables_of(resolved, kind)
            added |= elastic_variables(resolved, machine, {**os.environ, **added}, pid=os.getpid(), glibc=glibc_version())
            _hand_over(elastic_command(resolved, program, machine, sys.executable), added, resolved)
        spec = spec_of(resolved, program, machine, kind)
        if resolved["num_processes"].level == resolved["nproc_per_node"].level == DEFAULT:
            _tell_default(resolved, machine)
        from allstep.launch.agent import launch as run

        result = run(spec)
    except AllstepError as error:
        raise _Refused(str(error)) from None
    from allstep.launch.failures import report  # not before the ranks have started

    if text := report(result, os.getcwd()):
        click.echo(text, err=True)
    sys.exit(result.exit_code)


class _Refused(click.ClickException):
    """What is wrong, without the usage of the command, which says nothing of it."""

    exit_code = 2


def _from_file(path: str | None) -> tuple[dict[str, Plain], str]:
    """The settings of the configuration file and its name, as far as there is one."""
    if path is None:
        return {}, "file"
    settings, unknown = read_config_file(path)
    if unknown:
        click.echo(f"allstep: {path} has keys that mean nothing here: {', '.join(unknown)}", err=True)
    return settings, path


def _tell_without_effect(flags: Mapping[str, Plain]) -> None:
    """One line for flags of torchrun and accelerate that change nothing here."""
    compiler = flags.get("dynamo_backend")
    if str(compiler or "no").lower() != "no":
        raise click.UsageError(f"--dynamo_backend {compiler} cannot be done here: call torch.compile(model) in the script.")
    typed = [name for name in (*WITHOUT_EFFECT, "dynamo_backend") if flags.get(name) is not None]
    if typed:
        click.echo(f"allstep: without effect here: {', '.join(f'--{name}' for name in typed)}", err=True)


def _tell_default(resolved: Mapping[str, Value], machine: Machine) -> None:
    if machine.gpus and not resolved["cpu"].value:
        return
    cores = machine.cores
    why = "--cpu" if machine.gpus else "no GPU in sight"
    click.echo(
        f"allstep: {why}, so 1 rank on the CPU, which has {cores} core{'s' if cores > 1 else ''} for this job. "
        f"For more ranks: allstep launch --num_processes {max(2, cores)} ...",
        err=True,
    )


def _table(rows: list[tuple[str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)


def _find(program: Program) -> None:
    """Refuse a script that is not there before anything starts. Modules are looked for by the ranks."""
    script = program.script
    if program.no_python and not program.module:
        import shutil  # loads compressors, and Python scripts do not need it

        if shutil.which(script) is None:
            raise click.UsageError(f"SCRIPT {script!r} is no program that can be run, here or on the PATH.")
        return
    if program.module or os.path.isfile(script):
        return
    if os.path.isdir(script):
        raise click.UsageError(f"SCRIPT {script!r} is a folder; expected a Python file. To run a package, use -m NAME.")
    hint = f" Did you mean `-m {script}`?" if not script.endswith(".py") and os.sep not in script else ""
    raise click.UsageError(f"SCRIPT {script!r} is not there: looked for {os.path.abspath(script)}.{hint}")


def _refuse_nesting(resolved: Mapping[str, Value]) -> None:
    """Refuse to start a job of its own in each of several processes.

    Raises:
        UsageError: this is a rank already, or one of several tasks that would each start all ranks.
        LaunchVariablesError: the variables of SLURM or MPI cannot be read.
    """
    if os.environ.get("ALLSTEP_RUN_ID") and os.environ.get("RANK"):
        raise click.UsageError(
            f"This is rank {os.environ['RANK']} of another `allstep launch` already; each of its ranks would start ranks of "
            "its own. Launch once, from outside, or unset ALLSTEP_RUN_ID where this is meant."
        )
    above = started_by_scheduler(os.environ)
    if above is not None and above.world_size > 1 and machines_of(resolved)[1] == 1:
        said = ", ".join(f"{name}={value}" for name, value in above.said.items())
        first, _ = above.said
        raise click.UsageError(
            f"{above.launcher} started {above.world_size} processes ({said}), and each would launch a job of its own here. "
            "Start the script itself, which then finds the others: `srun python train.py` or `mpirun python train.py`. Or one "
            "launch on each machine, with --num_machines, --machine_rank and --main_process_ip. Where separate jobs are meant, "
            f"unset {first} before each."
        )


def _hand_over(command: list[str], added: Mapping[str, str], resolved: Mapping[str, Value]) -> None:
    """Become torch's elastic agent."""
    machines = f"{resolved['num_machines'].value} machines"
    click.echo(f"allstep: {machines} that find one another: handed to torch's elastic agent (torch.distributed.run)", err=True)
    sys.stdout.flush()
    os.execve(command[0], command, {**os.environ, **added})
