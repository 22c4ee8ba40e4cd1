import socket

import pytest

from allstep.errors import ArgumentsError
from allstep.launch.ports import HeldPort


def test_rank_zero_can_listen_on_a_port_that_is_held():
    places = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")]
    if socket.has_dualstack_ipv6():
        places.append((socket.AF_INET6, "::"))
    with HeldPort() as held:
        for family, address in places:
            with socket.socket(family) as listener:  # what torch's store does, with and without libuv
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((address, held.port))
                listener.listen()
                socket.create_connection(("127.0.0.1", held.port)).close()


def test_held_ports_differ_and_nobody_else_is_given_one():
    holders = [HeldPort() for _ in range(200)]
    ports = {held.port for held in holders}
    assert len(ports) == 200
    others = []
    for _ in range(200):
        others.append(socket.socket())
        others[-1].bind(("127.0.0.1", 0))
    assert not ports & {other.getsockname()[1] for other in others}
    for one in (*holders, *others):
        one.close()


def test_a_port_with_a_listener_is_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ArgumentsError, match=rf"Port {port} .* is taken by another process.*--main_process_port"):
            HeldPort(port)


def test_a_port_that_another_launch_holds_is_refused():
    with HeldPort() as held, pytest.raises(ArgumentsError, match=rf"Port {held.port} .* taken by another `allstep launch`"):
        HeldPort(held.port)


def test_a_port_can_be_held_again_right_after_it_was_used():
    with HeldPort() as held:
        port = held.port
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen()
            client = socket.create_connection(("127.0.0.1", port))
            accepted, _ = listener.accept()
            accepted.close()  # the side that closes first leaves a connection in TIME_WAIT on this port
            client.close()
    with HeldPort(port) as again:
        assert again.port == port
