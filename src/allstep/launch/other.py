"""A machine other than 0 of a job on several hosts: reaches machine 0, tells it what it sees, and does as the job does."""

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from allstep.errors import ArgumentsError
from allstep.launch.channel import Channel, Closed
from allstep.launch.generation import Generation
from allstep.launch.hosts import leave, meeting_port, own_hello, view_in, wait
from allstep.launch.job import JobState
from allstep.launch.network import interface_addresses, interface_of, resolved
from allstep.launch.result import LaunchResult
from allstep.launch.signals import Signals
from allstep.launch.spec import LaunchSpec
from allstep.launch.views import NOTHING, View, lost, merged, told

__all__ = ["Other"]

CONNECT = 30.0
"""Seconds in which machine 0 must be reached. It may be started a little later than the others."""


class Other:
    """Any other machine."""

    def __init__(self, spec: LaunchSpec, signals: Signals) -> None:
        self._spec = spec
        self._signals = signals
        self._channel: Channel | None = None
        self._peer = ""
        self._number = 0
        self._view: View | None = None
        self._verdict: tuple[LaunchResult, bool] | None = None
        self._last: dict[str, Any] = {}

    def begin(self) -> Generation:
        if self._channel is None:
            self._channel = self._reach()
            self._peer = self._channel.socket.getpeername()[0]
            self._send(own_hello(self._spec).message())
        self._view = self._verdict = None
        self._last = {}
        fields = self._start()
        self._number = fields["number"]
        return Generation.of(fields, machine=self._spec.machine_rank, master_addr=self._peer)

    def interface(self) -> str | None:
        assert self._channel is not None
        return interface_of(self._channel.socket.getsockname()[0], interface_addresses())

    def sockets(self) -> list[socket.socket]:
        return [self._channel.socket] if self._channel is not None else []

    def exchange(self, job: JobState, now: float, tail: tuple[str, ...] | None) -> JobState:
        if tail is not None:
            machines = tuple(replace(each, over=True) if each.machine == job.machine else each for each in job.machines)
            job = replace(job, machines=machines)
        if self._channel is not None:
            self._hear(job, now)
        if self._channel is not None:
            self._tell(job, now, tail or ())
        return merged(job, [self._view] if self._view is not None else [])

    def settle(self, result: LaunchResult, again: bool) -> tuple[LaunchResult, bool]:
        if self._verdict is None:  # machine 0 is lost
            return result, False
        if not self._verdict[1]:
            self.close()
        return self._verdict

    def close(self, reason: str = "") -> None:
        leave([self._channel] if self._channel is not None else [], reason)
        self._channel = None

    @property
    def _place(self) -> str:
        return f"{self._spec.main_process_ip}:{meeting_port(self._spec)}"

    def _reach(self) -> Channel:
        """A connection to machine 0."""
        assert self._spec.main_process_ip is not None
        deadline, reason = time.monotonic() + CONNECT, "it did not answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                port = meeting_port(self._spec)
                for _, numeric in resolved(self._spec.main_process_ip, port):
                    return Channel(socket.create_connection((numeric, port), timeout=min(3.0, left)), trusted=True)
            except OSError as error:
                reason = error.strerror or str(error)
            wait(self._signals, [], min(0.5, left))
        raise ArgumentsError(
            f"Machine 0 cannot be reached at {self._place} from machine {self._spec.machine_rank} ({os.uname().nodename}), "
            f"tried for {CONNECT:g} s: {reason}. Start `allstep launch` with --machine_rank 0 there, and let this host "
            "connect to that port."
        )

    def _start(self) -> dict[str, Any]:
        """What machine 0 says when all have come."""
        while True:
            try:
                assert self._channel is not None
                while (message := self._channel.take()) is not None:
                    if message["kind"] == "start":
                        return dict(message["generation"])
                    if message["kind"] in ("refused", "leaving"):
                        refused = "refused this host" if message["kind"] == "refused" else "left"
                        raise ArgumentsError(f"Machine 0 at {self._place} {refused}: {message.get('reason')}.")
                self._channel.beat()
            except Closed as closed:
                raise ArgumentsError(
                    f"Machine 0 at {self._place} went away before the ranks were started: {closed}. If it is not a launcher "
                    "that listens there, choose another --main_process_port."
                ) from None
            wait(self._signals, self.sockets())

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._channel is not None
        with contextlib.suppress(Closed):  # told by what is received next
            self._channel.send(message)

    def _hear(self, job: JobState, now: float) -> None:
        assert self._channel is not None
        others = [each.machine for each in job.machines if each.machine != job.machine]
        try:
            while self._verdict is None and (message := self._channel.take()) is not None:
                if message["kind"] == "verdict":
                    self._verdict = LaunchResult.from_json(message["result"]), bool(message["again"])
                    over = tuple(replace(each, over=True) for each in job.machines if each.machine == 0)
                    self._view = replace(self._view or NOTHING, machines=over)
                else:
                    self._view = view_in(message, others, self._number, now) or self._view
        except Closed as closed:
            self._lose(job, now, str(closed))

    def _lose(self, job: JobState, now: float, because: str) -> None:
        """Machine 0 is gone, and with it all news of the others."""
        assert self._channel is not None
        job = merged(job, [self._view] if self._view is not None else [])
        others = [each.machine for each in job.machines if each.machine != job.machine]
        self._view = lost(job, others, heard=now - self._channel.silence, now=now, because=because)
        self._channel.close()
        self._channel = None

    def _tell(self, job: JobState, now: float, tail: tuple[str, ...]) -> None:
        """Tell machine 0 about the ranks of this host, where there is news."""
        assert self._channel is not None
        own = replace(
            job,
            ranks=job.here,
            machines=tuple(each for each in job.machines if each.machine == job.machine),
            requests=tuple(each for each in job.requests if each.machine == job.machine),
        )
        news = told(own, tail)
        try:
            if news != self._last:
                self._channel.send({"kind": "states", "number": self._number, "now": now, **news})
            self._channel.beat()
        except Closed as closed:
            self._lose(job, now, str(closed))
        self._last = news
