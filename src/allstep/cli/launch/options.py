"""The options of `allstep launch`: one for each word of a setting, and torchrun's and accelerate's others."""

import re
from collections.abc import Callable
from typing import Any

import click

from allstep.launch.foreign import WITHOUT_EFFECT, refusal
from allstep.launch.settings import SETTINGS, Setting

__all__ = ["LaunchCommand", "setting_options"]

_STREAMS = re.compile(r"[0-3](,?\d+:[0-3])*|\d+:[0-3](,\d+:[0-3])*")
"""What torchrun has after --tee and --redirects: one of 0 to 3, or such a number for each local rank."""

_SHORT = {"quiet": "-q", "redirects": "-r"}

_Command = Callable[..., Any]


def setting_options(command: _Command) -> _Command:
    """Give `command` an option for each setting. Those that are not typed come as None."""
    for name in reversed(WITHOUT_EFFECT):
        takes_value = WITHOUT_EFFECT[name]
        names = [*([_SHORT[name]] if name in _SHORT else []), f"--{name}", name]
        kind = {"type": str} if takes_value else {"is_flag": True, "default": None}
        command = click.option(*names, hidden=True, **kind)(command)
    command = click.option("--dynamo_backend", hidden=True)(command)
    for setting in reversed(SETTINGS):
        for word in reversed(setting.words):
            command = _option(setting, word)(command)
    return command


def _option(setting: Setting, word: str) -> Callable[[_Command], _Command]:
    own = word == setting.name
    names = [*([setting.short] if setting.short and own else []), f"--{word}", word]
    text = setting.help if own else f"torchrun's word for --{setting.name}."
    if own and setting.default is not None and "Default" not in text and setting.kind is not bool:
        text += f" Default: {setting.default}."
    if setting.kind is bool:
        return click.option(*names, is_flag=True, default=None, help=text, hidden=not own)
    return click.option(*names, type=setting.kind, metavar=setting.metavar, help=text)


class LaunchCommand(click.Command):
    """A command that says of torchrun's and accelerate's other options what to write instead."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options.

        Raises:
            UsageError: one is not there; with what to write instead, where it is one of torchrun or accelerate.
        """
        try:
            return super().parse_args(ctx, self._without_streams(args))
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").removeprefix("no_use_")
            if reason := refusal(name):
                raise click.UsageError(f"{error.option_name} cannot be done here: {reason}.", ctx) from None
            raise

    def _without_streams(self, args: list[str]) -> list[str]:
        """`args` without the value that may follow --tee, as in torchrun; what follows SCRIPT is left alone."""
        takes_value = {
            name: not (isinstance(option, click.Option) and option.is_flag) for option in self.params for name in option.opts
        }
        kept: list[str] = []
        rest = list(args)
        while rest and rest[0].startswith("-") and rest[0] != "--":
            word = rest.pop(0)
            name, has_value, value = word.partition("=")
            if name.replace("-", "_").lstrip("_") in ("tee", "t"):
                if not has_value and rest and _STREAMS.fullmatch(rest[0]):
                    value = rest.pop(0)
                kept += [] if value == "0" else [name]
                continue
            kept.append(word)
            if not has_value and takes_value.get(f"--{name.lstrip('-').replace('-', '_')}", takes_value.get(name)) and rest:
                kept.append(rest.pop(0))
        return kept + rest
