"""The program `allstep`. Each command is a module of its own, imported when it is used: `allstep --help` loads none."""

import importlib

import click

import allstep

__all__ = ["main"]

_COMMANDS = {
    "bench": ("allstep.cli.bench.command", "Measure allstep against its peers on this machine."),
    "doctor": ("allstep.cli.doctor.command", "Say what this machine has, try its backends, and what to type where it fails."),
    "verify": ("allstep.cli.verify.command", "Compare what a script does on 1, 2 and 4 ranks, to the bit."),
    "launch": ("allstep.cli.launch.command", "Start a script on several ranks, and watch over them."),
}
"""Name of a command → the module that has a click command of that name, and what it does in one line."""


class _Commands(click.Group):
    """Commands that are imported one by one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(_COMMANDS[cmd_name][0]), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(allstep.__version__, prog_name="allstep")
def main() -> None:
    """Data-parallel training for PyTorch: the same script on one rank and on many.

    `allstep COMMAND --help` tells more about a command.
    """
