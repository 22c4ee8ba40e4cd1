"""What the reader of one launcher's variables found. It is compared with RANK and WORLD_SIZE before it is believed."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from allstep.errors import LaunchVariablesError

__all__ = ["Found", "port_of", "whole_number"]

_FIRST_PORT, _PORTS = 1 << 14, 1 << 14
"""Ports below those that Linux gives to outgoing connections, so that nothing takes one by chance."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One process of a job, in the words of its launcher."""

    launcher: str
    """Name of the launcher, as in `WorkerEnvironment.launcher`."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    said: Mapping[str, str]
    """The variables that gave rank and world size, in this order."""
    master_addr: str = ""
    """Host of rank 0; empty where the launcher does not tell."""
    master_port: int = 0
    """A port that all processes of the job derive alike; 0 where the launcher leaves nothing to derive it from."""
    remedy: str = ""
    """What to type where an address or a port is missing."""


def port_of(job: str | int) -> int:
    """A port that follows from what names a job: the same on all of its ranks, and another for the next job.

    Numbers in a row give ports in a row, so that jobs submitted one after the other cannot meet.
    """
    number = job if isinstance(job, int) else zlib.crc32(job.encode())
    return _FIRST_PORT + number % _PORTS


def whole_number(name: str, variables: Mapping[str, str], default: int | None = None) -> int:
    """The number in the variable `name`, or `default` where it is not set.

    Raises:
        LaunchVariablesError: it is no whole number, or not set and there is no default.
    """
    text = variables.get(name) or ("" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise LaunchVariablesError(f"{name}={text!r} is not a whole number; launchers set it to one.") from None
