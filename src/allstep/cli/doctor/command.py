"""`allstep doctor`: gathers facts, tries the backends, and says what is wrong."""

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import click

from allstep.cli.doctor.facts import launcher_facts, machine_facts, network_facts, software_facts
from allstep.cli.doctor.problems import problems_of
from allstep.cli.doctor.report import lines_of
from allstep.cli.doctor.trials import try_backends, try_torch
from allstep.cli.launch.describe import described
from allstep.errors import AllstepError
from allstep.launch.config_file import CONFIG_FILE, read_config_file
from allstep.launch.plan import Machine
from allstep.launch.settings import resolve
from allstep.launch.spec import cores_available, visible_gpus

__all__ = ["doctor"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write all of it as JSON.")
@click.option("--no_trials", "--no-trials", is_flag=True, help="Do not start ranks: a second instead of some ten.")
def doctor(as_json: bool, no_trials: bool) -> None:
    """Say what this machine has, try two ranks over each backend, and tell what to type where something is wrong.

    Nothing is changed. Include the output when you report a problem.

    \b
    Exit status: 0; 1 where something is broken.
    """
    facts = _gathered(trials=not no_trials)
    problems = problems_of(facts)
    if as_json:
        click.echo(json.dumps({**facts, "problems": [asdict(problem) for problem in problems]}, indent=2))
    else:
        click.echo("\n".join(lines_of(facts, problems)))
    sys.exit(1 if any(problem.broken for problem in problems) else 0)


def _gathered(*, trials: bool) -> dict[str, Any]:
    torch = try_torch()
    return {
        "software": software_facts(),
        "torch": torch,
        "machine": machine_facts(),
        "network": network_facts(),
        "launchers": launcher_facts(os.environ),
        "launch": _launch_rows(),
        "trials": try_backends(torch) if trials else [],
    }


def _launch_rows() -> list[tuple[str, str, str]]:
    """What a launch without flags comes to: settings that the environment changes, and the ranks."""
    try:
        path = os.environ.get(CONFIG_FILE)
        resolved = resolve({}, os.environ, read_config_file(path)[0] if path else {}, path or "file")
        machine = Machine(gpus=visible_gpus(os.environ), cores=cores_available())
        return [row for row in described(resolved, machine) if row[2] != "default"]
    except AllstepError as error:
        return [("refused", str(error), "environment")]
