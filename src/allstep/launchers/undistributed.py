"""Notices a process that trains alone where several were asked for, before it trains.

Nothing fails by itself then: each process has a world of one, and the result is that of one process, or of the last one that
wrote it.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping

from allstep.environment import WorkerEnvironment
from allstep.errors import LaunchVariablesError
from allstep.launchers.ancestors import Process, ancestors

__all__ = ["check_alone", "check_joined", "processes_asked_of_accelerate"]

_LAUNCH = ("accelerate.commands.launch", "accelerate-launch")
"""Words of a command line behind which the flags of `accelerate launch` follow; "accelerate launch" is the usual one."""


def check_joined(variables: Mapping[str, str], above: Callable[[], Iterable[Process]] = ancestors) -> None:
    """Refuse to go on without a process group where the launcher started several processes.

    Args:
        variables: the environment of this process.
        above: gives the processes above it.

    Raises:
        LaunchVariablesError: this is one of several processes, or should be.
    """
    environment = WorkerEnvironment.from_variables(variables)
    if environment.world_size > 1:
        who = "RANK and WORLD_SIZE say" if environment.launcher == "variables" else f"{environment.launcher} says"
        raise LaunchVariablesError(
            f"This is rank {environment.rank} of {environment.world_size}, as {who}, but it has joined no process group, so it "
            "would train alone and its gradients would not be averaged. Call allstep.join(), or "
            "torch.distributed.init_process_group(), before DistributedDataParallel(...). To train alone here, unset RANK and "
            "WORLD_SIZE, or those of the launcher."
        )
    check_alone(environment, variables, above)


def check_alone(
    environment: WorkerEnvironment, variables: Mapping[str, str], above: Callable[[], Iterable[Process]] = ancestors
) -> None:
    """Refuse a world of one below an `accelerate launch` that was asked for more.

    Raises:
        LaunchVariablesError: with the line to type instead.
    """
    # accelerate sets this one for every process; only then is it worth reading what runs above
    if environment.is_launched or not variables.get("ACCELERATE_MIXED_PRECISION"):
        return
    for process in above():
        words = _behind_launch(process.command)
        count = processes_asked_of_accelerate(words)
        if count > 1:
            line = " ".join(_quoted(word) for word in words)
            rest = " ".join(_quoted(word) for word in words if word != "--cpu")  # accelerate takes one of the two
            raise LaunchVariablesError(
                f"`accelerate launch` was asked for {count} processes and started this one alone, as it does on machines with "
                f"less than two GPUs, with --cpu too. Write\n    allstep launch {line}\n"
                f"or\n    accelerate launch --multi_gpu {rest}\nEither starts {count}, on the CPU where there is no GPU."
            )


def processes_asked_of_accelerate(words: Iterable[str]) -> int:
    """What --num_processes says among the flags of `accelerate launch`; 1 where it is not there.

    Args:
        words: what follows `launch` on its command line. The script and its arguments are left alone.
    """
    before = ""
    for word in words:
        if before == "--num_processes":
            return int(word) if word.isdecimal() else 1
        if before in ("-m", "--module") or (not word.startswith("-") and word.endswith(".py")):
            return 1
        before, _, value = word.partition("=")
        before = "--" + before[2:].replace("-", "_") if before.startswith("--") else before
        if before == "--num_processes" and value.isdecimal():
            return int(value)
    return 1


def _behind_launch(command: tuple[str, ...]) -> tuple[str, ...]:
    """What follows `accelerate launch` on a command line; nothing where it is another program."""
    for index, word in enumerate(command[:4]):
        if index > 1 and not command[index - 1].startswith("-"):
            break  # that was the program which the interpreter runs
        name = os.path.basename(word)
        if name in _LAUNCH:
            return command[index + 1 :]
        if name in ("accelerate", "accelerate.commands.accelerate_cli") and command[index + 1 : index + 2] == ("launch",):
            return command[index + 2 :]
    return ()


def _quoted(word: str) -> str:
    """`word` as a shell takes it."""
    return word if re.fullmatch(r"[\w@%+=:,./-]+", word) else "'" + word.replace("'", "'\"'\"'") + "'"
