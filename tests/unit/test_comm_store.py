import socket
from datetime import timedelta
from pathlib import Path

import pytest

from allstep.comm.store import open_store
from allstep.launch.ports import HeldPort

LISTENING = "0A"


def listening(port):
    """The addresses where somebody of this host listens on `port`, as /proc writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    places = [fields[1].split(":") for fields in lines if fields[3] == LISTENING]
    return [address for address, number in places if int(number, 16) == port]


def test_the_store_listens_at_its_address_only():
    with HeldPort() as held:
        store = open_store("127.0.0.1", held.port, rank=0, size=1, timeout=timedelta(seconds=30))
        assert listening(held.port) == ["0100007F"]
        store.set("a", "b")
        assert store.get("a") == b"b"


def test_a_port_where_another_listens_is_an_error():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            open_store("127.0.0.1", other.getsockname()[1], rank=0, size=1, timeout=timedelta(seconds=1))
