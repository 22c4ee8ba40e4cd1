"""Several hosts: machine 0 lets the others in, tells all who is where, hears what each sees, and says how it ended.

The launchers form a star around machine 0. Each tells it about its own ranks, whenever something changes; machine 0 passes on
what failed, and who was asked to stop. So every launcher decides by itself what to do with its own ranks. Only the end is told
by one: by machine 0, which knows of all, so that all hosts report the same. A host that is not heard of counts as lost.

`first.py` is machine 0, `other.py` any other; here is what both do.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

from allstep.launch.channel import Channel, Closed
from allstep.launch.door import Hello
from allstep.launch.party import Stopped
from allstep.launch.signals import Signals, is_request
from allstep.launch.spec import LaunchSpec
from allstep.launch.views import View

__all__ = ["FAREWELL", "drained", "leave", "meeting_port", "own_hello", "view_in", "wait"]

DEFAULT_PORT = 29500
"""Where the launchers meet unless told otherwise; torchrun's is the same."""
FAREWELL = 5.0
"""Seconds that the last messages may take."""


def meeting_port(spec: LaunchSpec) -> int:
    """The port on machine 0 where the launchers meet."""
    return spec.main_process_port or DEFAULT_PORT


def own_hello(spec: LaunchSpec) -> Hello:
    """What the launcher of `spec` says of itself."""
    return Hello(
        machine_rank=spec.machine_rank,
        num_machines=spec.num_machines,
        ranks=spec.num_processes,
        host=os.uname().nodename,
        run_id=spec.run_id,
    )


def view_in(message: Mapping[str, Any], machines: list[int], number: int, now: float) -> View | None:
    """What a message says of `machines`; None where it says nothing of this generation.

    Raises:
        Closed: the other end leaves, or this is no message between launchers of one version.
    """
    if message["kind"] == "leaving":
        raise Closed(f"its launcher left: {message.get('reason')}")
    if message["kind"] != "states" or message.get("number") != number:
        return None
    try:
        return View.of(message, machines, now)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Closed("it sent what is no message") from None


def wait(signals: Signals, sockets: list[socket.socket], seconds: float = 1.0) -> None:
    """Wait for something to come in, `seconds` at most.

    Raises:
        Stopped: what came is a signal by which somebody asks the job to stop.
    """
    signals.wait(seconds, sockets)
    for number in signals.taken():
        if is_request(number):
            raise Stopped(number)


def drained(channels: Iterable[Channel], seconds: float) -> None:
    """Wait until the others have read the last message and closed: whoever closes first may take it from them."""
    deadline, left = time.monotonic() + seconds, list(channels)
    while left and time.monotonic() < deadline:
        for channel in list(left):
            try:
                channel.flush()
                while channel.take() is not None:
                    pass
            except Closed:
                left.remove(channel)
        time.sleep(0.005)


def leave(channels: Iterable[Channel], reason: str) -> None:
    """End connections, and where there is a reason, tell it."""
    channels = list(channels)
    if reason:
        for channel in channels:
            with contextlib.suppress(Closed, OSError):
                channel.send({"kind": "leaving", "reason": reason})
                channel.socket.shutdown(socket.SHUT_WR)
        drained(channels, 1.0)
    for channel in channels:
        channel.close()
