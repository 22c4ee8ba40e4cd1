"""The port on which rank 0 meets the others: found, shown to be free, and held until the job ends.

A port that is looked up, let go and used later can be taken in between. Here the socket stays bound for as long as the job
runs, and never listens. Linux lets rank 0 bind the same port beside it, because both sockets carry SO_REUSEADDR and only
one listens (torch's store does so, with libuv and without), while every search for a free port passes it over.
"""

import errno
import os
import socket

from allstep.errors import ArgumentsError

__all__ = ["HeldPort"]


class HeldPort:
    """A TCP port of this host that nobody else is given while this object is open."""

    def __init__(self, port: int = 0) -> None:
        """Hold `port`, or a free one where it is 0.

        Raises:
            ArgumentsError: the port is taken, or may not be used by this user.
        """
        self._sockets = [_bound(port)]
        self.port: int = self._sockets[0].getsockname()[1]
        try:
            self._sockets.append(_claim(self.port))
        except OSError:
            self.close()
            raise _taken(port, "by another `allstep launch`") from None

    def close(self) -> None:
        """Let the port go."""
        for held in self._sockets:
            held.close()

    def __enter__(self) -> "HeldPort":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bound(port: int) -> socket.socket:
    """A socket bound to `port` on every address of this host, of both families where it has both."""
    try:
        if socket.has_dualstack_ipv6():
            held = socket.socket(socket.AF_INET6)
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        else:
            held = socket.socket(socket.AF_INET)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", port))
        except BaseException:
            held.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(port, "by another process that listens there") from None
        raise ArgumentsError(f"Port {port} cannot be used on this host: {error.strerror}. {_REMEDY}") from None
    return held


def _claim(port: int) -> socket.socket:
    """A name in the kernel, of the same reach as the port, that two launches cannot both have.

    The port alone does not tell them apart: neither listens, so Linux lets both bind it.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0allstep-port-{port}")
    except BaseException:
        claim.close()
        raise
    return claim


_REMEDY = "Choose another with --main_process_port, or leave the option out and a free one is found."


def _taken(port: int, whom: str) -> ArgumentsError:
    return ArgumentsError(f"Port {port} on {os.uname().nodename} is taken {whom}. {_REMEDY}")
