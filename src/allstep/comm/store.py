"""The store where the ranks of a job meet, listening at one address: torch's own way to make it listens at all of the host."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["open_store"]


def open_store(address: str, port: int, *, rank: int, size: int, timeout: timedelta) -> Store:
    """The store at `address` and `port`, which rank 0 serves there, for `init_process_group`. Returns when all have come.

    Args:
        timeout: for that, and for every wait of the store.

    Raises:
        OSError: rank 0 cannot listen there.
        RuntimeError: the others did not come, or rank 0 did not, within `timeout`.
    """
    listener = _listener(address, port) if rank == 0 else None
    store = TCPStore(
        address,
        port,
        size,
        is_master=listener is not None,
        timeout=timeout,
        master_listen_fd=listener.detach() if listener is not None else None,  # the store closes it
    )
    return PrefixStore("default_pg", store)


def _listener(address: str, port: int) -> socket.socket:
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        # Beside the launcher's socket that holds the port and does not listen (launch/ports.py).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener
