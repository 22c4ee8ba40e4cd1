"""Addresses of this host: where machine 0 is, and which interface leads there."""

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Sequence

from allstep.errors import ArgumentsError

__all__ = ["interface_addresses", "interface_of", "listen", "resolved"]

_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s24x") if struct.calcsize("P") == 8 else struct.Struct("16s16x")
"""Name of an interface, and one of its addresses."""


def interface_of(address: str, addresses: Iterable[tuple[str, str]]) -> str | None:
    """The network interface that has `address`, among (interface, address) pairs; None where none has."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    names = [name for name, each in addresses if ipaddress.ip_address(each) == wanted]
    # all of 127.0.0.0/8 is the loopback interface's, whatever address that has
    names += [name for name, each in addresses if wanted.is_loopback and ipaddress.ip_address(each).is_loopback]
    return names[0].partition(":")[0] if names else None  # "eth0:1" is another address of eth0


def interface_addresses() -> list[tuple[str, str]]:
    """(interface, address) for each address of this host, or of this container."""
    return [*_addresses_4(), *_addresses_6()]


def _addresses_4() -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(_IFREQ.size * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        length = struct.unpack_from("i", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))[0]
    found = []
    for start in range(0, length, _IFREQ.size):
        entry = bytes(buffer[start : start + _IFREQ.size])
        found.append((entry[:16].rstrip(b"\0").decode(), socket.inet_ntoa(entry[20:24])))
    return found


def _addresses_6() -> list[tuple[str, str]]:
    found = []
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, *_, name = line.split()
            found.append((name, str(ipaddress.ip_address(bytes.fromhex(digits)))))
    return found


def resolved(address: str, port: int) -> list[tuple[int, str]]:
    """The address families and numeric addresses that `address` stands for.

    Raises:
        OSError: it stands for none.
    """
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((int(family), str(place[0])) for family, _, _, _, place in found))


def listen(address: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens on `port` at `address`, one of this host's, and nowhere else; and that address in numbers.

    Raises:
        ArgumentsError: the port is taken, or this host has no such address.
    """
    try:
        places = resolved(address, port)
    except OSError as error:
        raise ArgumentsError(f"main_process_ip={address!r} stands for no address: {error.strerror}. Write one.") from None
    _refuse_own_name(address, [numeric for _, numeric in places])
    last: OSError | None = None
    for family, numeric in places:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((numeric, port))
            listener.listen()
        except OSError as error:
            listener.close()
            last = error
        else:
            listener.setblocking(False)
            return listener, numeric
    assert last is not None
    mine = sorted({each for name, each in interface_addresses() if name != "lo"})
    raise ArgumentsError(
        f"Machine 0 cannot listen on {address}:{port}: {last.strerror}. --main_process_ip is an address of machine 0 (this "
        f"host has {', '.join(mine) or 'none but 127.0.0.1'}), --main_process_port a port that is free there."
    )


def _refuse_own_name(address: str, numerics: Sequence[str]) -> None:
    """Many systems let the name of a host stand for its loopback address on that host alone."""
    loopback = all(ipaddress.ip_address(numeric.partition("%")[0]).is_loopback for numeric in numerics)
    if loopback and address not in (*numerics, "localhost"):
        raise ArgumentsError(
            f"main_process_ip={address!r} stands for {numerics[0]} on this host, where no other host reaches it. Write the "
            "address by which the others reach this host."
        )
