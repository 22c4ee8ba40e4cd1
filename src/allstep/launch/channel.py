"""A connection between two launchers: lines of JSON, none longer than a limit, in both directions, and nobody waits.

Whoever sends garbage, too much, or nothing for too long is `Closed`. That ends the connection and nothing else.
"""

import contextlib
import json
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

__all__ = ["BEAT", "SILENCE", "Channel", "Closed"]

BEAT = 2.0
"""Seconds after which a launcher with nothing to tell says that it is there."""
SILENCE = 10.0
"""Seconds without a word after which the other end counts as gone: its host may have lost power or network."""
FIRST_LINE = 4096
"""Bytes of a line from somebody who has not been let in."""
LONGEST_LINE = 64 << 20
"""Bytes of any line, and of all that waits to be sent. Messages of exceptions are a few hundred; some hold whole tensors."""
CHUNK = 1 << 20


class Closed(Exception):  # noqa: N818 - an end, not always an error
    """The other end is gone, or says what no launcher says; the text tells which."""


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, *, trusted: bool = False) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.trusted = trusted
        """Whether the other end has shown that it belongs to this job; until then its lines must be short."""
        self._incoming = b""
        self._messages: deque[dict[str, Any]] = deque()
        self._ended: str | None = None
        self._outgoing = bytearray()
        self._heard = self._spoke = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since something came in."""
        return time.monotonic() - self._heard

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, as far as the other end takes it; the rest goes with the next ones.

        Raises:
            Closed: it is gone, or takes nothing.
        """
        self._outgoing += json.dumps(message).encode() + b"\n"
        self._spoke = time.monotonic()
        self.flush()

    def beat(self) -> None:
        """Say that this end is there, if it has said nothing for a while."""
        if time.monotonic() - self._spoke >= BEAT:
            self.send({"kind": "beat"})
        else:
            self.flush()

    def flush(self) -> bool:
        """Send what still waits; returns whether all is gone."""
        try:
            while self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing[:CHUNK])]
        except BlockingIOError:
            if len(self._outgoing) > LONGEST_LINE:
                raise Closed("it takes no more messages") from None
        except OSError as error:
            raise Closed(_reason(error)) from None
        return not self._outgoing

    def take(self) -> dict[str, Any] | None:
        """The next message; None where none has come yet.

        Raises:
            Closed: there will be no more.
        """
        if not self._messages and self._ended is None:
            self._read()
        if self._messages:
            return self._messages.popleft()
        if self._ended is None and self.silence > SILENCE:
            self._ended = f"nothing was heard from it for {SILENCE:g} s"
        if self._ended is not None:
            raise Closed(self._ended)
        return None

    def _read(self) -> None:
        try:
            while chunk := self.socket.recv(CHUNK):
                self._heard = time.monotonic()
                *lines, self._incoming = (self._incoming + chunk).split(b"\n")
                for line in lines:
                    self._understand(line)
                if len(self._incoming) > (LONGEST_LINE if self.trusted else FIRST_LINE):
                    raise Closed("it sent a line that is too long")
                if self._messages:
                    return
            self._ended = "the connection was closed from there"
        except BlockingIOError:
            pass
        except OSError as error:
            self._ended = _reason(error)
        except Closed as closed:
            self._ended = str(closed)

    def _understand(self, line: bytes) -> None:
        message = _parsed(line)
        if message["kind"] != "beat":
            self._messages.append(message)

    def close(self) -> None:
        """End the connection."""
        self.socket.close()


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise Closed("it sent what is no message")
    return message


def _reason(error: OSError) -> str:
    return f"its connection broke: {error.strerror or error}"
