"""Who takes part in a launch: one host alone, or several whose launchers agree on each step (`hosts.py`)."""

import os
import socket
from typing import TYPE_CHECKING, Protocol

from allstep.launch.generation import Generation
from allstep.launch.ports import HeldPort
from allstep.launch.spec import LaunchSpec

if TYPE_CHECKING:
    from allstep.launch.job import JobState
    from allstep.launch.result import LaunchResult

__all__ = ["HOST", "Alone", "Party", "Stopped"]

HOST = "127.0.0.1"


class Stopped(Exception):  # noqa: N818 - not an error
    """A signal asked the launcher to stop while no rank ran."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


class Party(Protocol):
    """The launchers of a job, seen from one of them."""

    def begin(self) -> Generation:
        """The next generation, agreed upon by all.

        Raises:
            ArgumentsError: they do not agree, some do not come, or a port is taken.
            Stopped: a signal asked this launcher to stop while it waited.
        """

    def interface(self) -> str | None:
        """The network interface by which the others are reached."""

    def sockets(self) -> list[socket.socket]:
        """Where something may come in that should wake this launcher."""

    def exchange(self, job: "JobState", now: float, tail: tuple[str, ...] | None) -> "JobState":
        """Tell the others what was seen here; returns the job as all of them see it.

        Args:
            tail: None as long as ranks are left here; then the last output of the one that failed first, if it was here.
        """

    def settle(self, result: "LaunchResult", again: bool) -> "tuple[LaunchResult, bool]":
        """The end of the generation as all launchers tell it, and whether all start again."""

    def close(self, reason: str = "") -> None:
        """Leave. `reason` tells the others why, where the job has not come to its end."""


class Alone:
    """One host: nobody to agree with."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._run_id = spec.run_id or os.urandom(16).hex()
        self._number = -1
        self._held: HeldPort | None = None

    def begin(self) -> Generation:
        self.close()
        self._number += 1
        # A rank that was not there when the port was given away must not find the next generation on it.
        self._held = HeldPort(self._spec.main_process_port if self._number == 0 else 0)
        return Generation(
            number=self._number,
            run_id=self._run_id,
            counts=(self._spec.num_processes,),
            hosts=(os.uname().nodename,),
            machine=0,
            master_addr=HOST,
            master_port=self._held.port,
            max_restarts=self._spec.max_restarts,
        )

    def interface(self) -> None:
        return None

    def sockets(self) -> list[socket.socket]:
        return []

    def exchange(self, job: "JobState", now: float, tail: tuple[str, ...] | None) -> "JobState":
        return job

    def settle(self, result: "LaunchResult", again: bool) -> "tuple[LaunchResult, bool]":
        return result, again

    def close(self, reason: str = "") -> None:
        if self._held is not None:
            self._held.close()
