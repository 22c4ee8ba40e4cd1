"""Machine 0 of a job on several hosts: waits for the others, and is the one that all others speak to."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from allstep.errors import ArgumentsError
from allstep.launch.channel import Channel, Closed
from allstep.launch.door import Door, Hello, refusal
from allstep.launch.generation import Generation
from allstep.launch.hosts import FAREWELL, drained, leave, meeting_port, own_hello, view_in, wait
from allstep.launch.job import JobState
from allstep.launch.network import interface_addresses, interface_of
from allstep.launch.ports import HeldPort
from allstep.launch.result import LaunchResult
from allstep.launch.signals import Signals
from allstep.launch.spec import LaunchSpec
from allstep.launch.views import NOTHING, View, lost, merged, told

__all__ = ["First"]

GATHER = 300.0
"""Seconds that machine 0 waits for the others to come."""
REMIND = (5.0, 60.0)
"""Seconds after which it first says for whom it waits, and after which again."""
TICK = 1.0
"""Seconds after which it looks at the clock while it waits."""


class First:
    """Machine 0."""

    def __init__(self, spec: LaunchSpec, signals: Signals, say: Callable[[str], None]) -> None:
        assert spec.main_process_ip is not None
        self._spec = spec
        self._signals = signals
        self._say = say
        self._hello = own_hello(spec)
        self._run_id = spec.run_id or os.urandom(16).hex()
        self._door = Door(spec.main_process_ip, meeting_port(spec), say)
        self._channels: dict[int, Channel] = {}
        self._hellos = {0: self._hello}
        self._views: dict[int, View] = {}
        self._number = -1
        self._held: HeldPort | None = None
        self._last: dict[str, Any] = {}

    def begin(self) -> Generation:
        if self._number < 0:
            self._gather()
        if self._held is not None:
            self._held.close()
        self._number += 1
        self._held = HeldPort()
        self._views.clear()
        self._last = {}
        generation = Generation(
            number=self._number,
            run_id=self._run_id,
            counts=tuple(self._hellos[machine].ranks for machine in range(self._spec.num_machines)),
            hosts=tuple(self._hellos[machine].host for machine in range(self._spec.num_machines)),
            machine=0,
            master_addr=self._door.address,
            master_port=self._held.port,
            max_restarts=self._spec.max_restarts,
        )
        for channel in self._channels.values():
            with contextlib.suppress(Closed):  # found lost at the first exchange
                channel.send({"kind": "start", "generation": generation.told()})
        return generation

    def interface(self) -> str | None:
        return interface_of(self._door.address, interface_addresses())

    def sockets(self) -> list[socket.socket]:
        return [*self._door.sockets(), *(channel.socket for channel in self._channels.values())]

    def exchange(self, job: JobState, now: float, tail: tuple[str, ...] | None) -> JobState:
        for channel, hello in self._door.arrivals():
            self._door.refuse(channel, hello, self._refusal(hello) or "the job has started")
        for machine in list(self._channels):
            self._hear(machine, job, now)
        job = merged(job, self._views.values())
        self._tell(job, now)
        return job

    def settle(self, result: LaunchResult, again: bool) -> tuple[LaunchResult, bool]:
        first = result.first_failure
        if first is not None and first.machine in self._views:
            result = replace(result, tail=self._views[first.machine].tail)
        for channel in self._channels.values():
            with contextlib.suppress(Closed):
                channel.send({"kind": "verdict", "number": self._number, "result": result.to_json(), "again": again})
        if not again:
            drained(self._channels.values(), FAREWELL)
        return result, again

    def close(self, reason: str = "") -> None:
        leave(self._channels.values(), reason)
        self._door.close()
        if self._held is not None:
            self._held.close()

    def _gather(self) -> None:
        """Wait until all others have come."""
        start = remind = time.monotonic()
        remind += REMIND[0]
        while missing := [machine for machine in range(1, self._spec.num_machines) if machine not in self._channels]:
            now = time.monotonic()
            if now >= start + GATHER:
                raise ArgumentsError(
                    f"{_machines(missing)} of {self._spec.num_machines} did not come to {self._place} within {GATHER:g} s. "
                    "Start `allstep launch` there too, with the same --main_process_ip and --main_process_port."
                )
            if now >= remind:
                self._say(f"allstep: waiting at {self._place} for {_machines(missing)} of {self._spec.num_machines}")
                remind = now + REMIND[1]
            wait(self._signals, self.sockets(), TICK)
            for channel, hello in self._door.arrivals():
                self._let_in(channel, hello)
            for machine, channel in list(self._channels.items()):
                self._keep(machine, channel)

    @property
    def _place(self) -> str:
        return f"{self._door.address}:{self._door.port}"

    def _refusal(self, hello: Hello) -> str | None:
        return refusal(hello, self._hello, {machine: known.host for machine, known in self._hellos.items()})

    def _let_in(self, channel: Channel, hello: Hello) -> None:
        reason = self._refusal(hello)
        if reason is not None:
            self._door.refuse(channel, hello, reason)
            return
        channel.trusted = True
        self._channels[hello.machine_rank] = channel
        self._hellos[hello.machine_rank] = hello

    def _keep(self, machine: int, channel: Channel) -> None:
        """See to it that a machine which came is still there; another launch may take the place of one that left."""
        try:
            while (message := channel.take()) is not None:
                if message["kind"] == "leaving":
                    raise Closed(str(message.get("reason")))
            channel.beat()
        except Closed as closed:
            channel.close()
            del self._channels[machine]
            hello = self._hellos.pop(machine)
            self._say(f"allstep: machine {machine} ({hello.host}) has left again: {closed}")

    def _hear(self, machine: int, job: JobState, now: float) -> None:
        channel = self._channels[machine]
        try:
            while (message := channel.take()) is not None:
                self._views[machine] = view_in(message, [machine], self._number, now) or self._views.get(machine, NOTHING)
        except Closed as closed:
            self._lose(machine, job, now, str(closed))

    def _lose(self, machine: int, job: JobState, now: float, because: str) -> None:
        channel = self._channels.pop(machine)
        channel.close()
        job = merged(job, self._views.values())
        tail = self._views[machine].tail if machine in self._views else ()
        view = lost(job, [machine], heard=now - channel.silence, now=now, because=because)
        self._views[machine] = replace(view, tail=tail)

    def _tell(self, job: JobState, now: float) -> None:
        """Pass on what may make others stop their ranks, where that is news: of a large job the rest would be much."""
        news = told(replace(job, ranks=tuple(state for state in job.ranks if state.failed)))
        for machine, channel in list(self._channels.items()):
            try:
                if news != self._last:
                    channel.send({"kind": "states", "number": self._number, "now": now, **news})
                channel.beat()
            except Closed as closed:
                self._lose(machine, job, now, str(closed))
        self._last = news


def _machines(machines: list[int]) -> str:
    return f"machine {machines[0]}" if len(machines) == 1 else f"machines {', '.join(map(str, machines))}"
