"""Where machine 0 lets the launchers of the other hosts in, and nobody else.

Whatever comes in here from outside ends neither the job nor the launcher: a newcomer has a few seconds and one short line to
say who it is, and only a few may be at the door at once.
"""

import contextlib
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from allstep import __version__
from allstep.launch.channel import Channel, Closed
from allstep.launch.network import listen

__all__ = ["Door", "Hello", "refusal"]

HELLO = "allstep launcher"
MOST_AT_ONCE = 64
"""Connections that have not said who they are; of more, those that have waited longest are closed."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a launcher says of itself first."""

    machine_rank: int
    num_machines: int
    ranks: int
    """Ranks that it will start."""
    host: str
    run_id: str | None
    """None: whatever machine 0 says."""
    version: str = __version__

    def message(self) -> dict[str, Any]:
        return {"kind": HELLO, **asdict(self)}

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Hello | None":
        """Who `message` is from; None where it is from no launcher. Of another version, what can be understood of it."""
        if message["kind"] != HELLO:
            return None
        numbers = {name: message.get(name) for name in ("machine_rank", "num_machines", "ranks")}
        texts = {name: message.get(name) for name in ("host", "version")}
        run_id = message.get("run_id")
        if not all(type(number) is int and 0 <= number < 1 << 20 for number in numbers.values()):
            return None
        if not all(isinstance(text, str) and text.isprintable() for text in (*texts.values(), run_id or "")):
            return None
        return cls(**numbers, **texts, run_id=run_id)  # type: ignore[arg-type] # each was looked at


def refusal(hello: Hello, own: Hello, taken: Mapping[int, str]) -> str | None:
    """Why a newcomer cannot take part; None where it can.

    Args:
        own: what machine 0 says of itself.
        taken: name of the host of each machine that has come already.
    """
    if hello.version != own.version:
        return f"it runs allstep {hello.version}, and machine 0 ({own.host}) allstep {own.version}: install one version on all"
    if hello.run_id != own.run_id:
        asked = f"--run_id {hello.run_id}" if hello.run_id is not None else "no --run_id"
        return f"it was started with {asked}, and machine 0 ({own.host}) otherwise: it belongs to another job"
    if hello.num_machines != own.num_machines:
        return f"it was started with --num_machines {hello.num_machines}, and machine 0 ({own.host}) with {own.num_machines}"
    if hello.machine_rank in taken:
        return f"--machine_rank {hello.machine_rank} is taken by {taken[hello.machine_rank]} already: give each host its own"
    if not (0 < hello.machine_rank < own.num_machines and hello.ranks > 0):
        return f"--machine_rank {hello.machine_rank} with {hello.ranks} ranks cannot be"
    return None


class Door:
    """Listens at the address of machine 0."""

    def __init__(self, address: str, port: int, say: Callable[[str], None]) -> None:
        """Open it.

        Raises:
            ArgumentsError: the port is taken, or this host has no such address.
        """
        self._listener, self.address = listen(address, port)
        self.port: int = self._listener.getsockname()[1]
        self._say = say
        self._waiting: dict[Channel, str] = {}
        self._known: set[str] = set()

    def sockets(self) -> list[socket.socket]:
        """Where somebody may come."""
        return [self._listener, *(channel.socket for channel in self._waiting)]

    def arrivals(self) -> list[tuple[Channel, Hello]]:
        """Launchers that came since the last call and said who they are; whether they may is for the caller to decide."""
        with contextlib.suppress(OSError):  # nobody more, or one that is gone again, or no descriptors are left
            while True:
                connection, place = self._listener.accept()
                self._waiting[Channel(connection)] = str(place[0])
        arrived = []
        for channel in list(self._waiting):
            try:
                message = channel.take()
            except Closed as closed:
                self._turn_away(channel, str(closed))
                continue
            if message is not None:
                hello = Hello.of(message)
                if hello is None:
                    self._turn_away(channel, "it is no launcher")
                else:
                    del self._waiting[channel]
                    arrived.append((channel, hello))
            elif len(self._waiting) > MOST_AT_ONCE:
                self._turn_away(channel, "too many others wait")
        return arrived

    def refuse(self, channel: Channel, hello: Hello, reason: str) -> None:
        """Turn a launcher away, and tell both sides why."""
        self._say(f"allstep: refused machine {hello.machine_rank} ({hello.host}): {reason}")
        with contextlib.suppress(Closed):
            channel.send({"kind": "refused", "reason": reason})
        channel.close()

    def close(self) -> None:
        """Let nobody in any more."""
        for channel in self._waiting:
            channel.close()
        self._waiting.clear()
        self._listener.close()

    def _turn_away(self, channel: Channel, reason: str) -> None:
        address = self._waiting.pop(channel)
        channel.close()
        if address not in self._known:  # each once: some networks are searched for open ports all day
            self._known.add(address)
            self._say(f"allstep: closed a connection from {address} that is not of this job: {reason}")
