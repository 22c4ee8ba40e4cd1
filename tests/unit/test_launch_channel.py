import json
import socket

import pytest

from allstep.launch import channel as channel_module
from allstep.launch.channel import Channel, Closed


@pytest.fixture
def ends():
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def until(channel):
    """The next message, however many reads it takes."""
    while (message := channel.take()) is None:
        pass
    return message


def test_messages_arrive_whole_and_in_order(ends):
    a, b = (Channel(end, trusted=True) for end in ends)
    for number in range(3):
        a.send({"kind": "x", "number": number})
    assert [until(b)["number"] for _ in range(3)] == [0, 1, 2]
    assert b.take() is None


def test_a_message_larger_than_what_the_kernel_holds_arrives(ends):
    a, b = (Channel(end, trusted=True) for end in ends)
    a.send({"kind": "x", "text": "y" * (8 << 20)})
    assert not a.flush()
    message = None
    while message is None:
        a.flush()
        message = b.take()
    assert len(message["text"]) == 8 << 20


def test_beats_are_no_messages_but_break_the_silence(ends, monkeypatch):
    a, b = (Channel(end, trusted=True) for end in ends)
    a.beat()  # it spoke just now
    monkeypatch.setattr(channel_module, "BEAT", 0.0)
    a.beat()
    a.send({"kind": "x"})
    assert until(b) == {"kind": "x"}


def test_silence_ends_it(ends, monkeypatch):
    a = Channel(ends[0])
    assert a.take() is None
    monkeypatch.setattr(channel_module, "SILENCE", 0.0)
    with pytest.raises(Closed, match="nothing was heard from it for 0 s"):
        a.take()


def test_what_came_before_the_end_is_still_read(ends):
    a, b = (Channel(end, trusted=True) for end in ends)
    a.send({"kind": "last"})
    a.close()
    assert until(b) == {"kind": "last"}
    for _ in range(2):
        with pytest.raises(Closed, match="the connection was closed from there"):
            b.take()


@pytest.mark.parametrize(
    "data", [b"\xff\xfe\n", b"[1, 2]\n", b'{"kind": 3}\n', b"{}\n", b"[" * 4000 + b"\n", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_garbage_ends_it(ends, data):
    channel = Channel(ends[0])
    ends[1].sendall(data)
    with pytest.raises(Closed, match="it sent what is no message"):
        channel.take()


@pytest.mark.parametrize("trusted", [False, True])
def test_who_has_not_been_let_in_may_send_short_lines_only(ends, trusted):
    channel = Channel(ends[0], trusted=trusted)
    ends[1].sendall(json.dumps({"kind": "x", "text": "y" * 5000})[:-1].encode())
    if trusted:
        assert channel.take() is None
    else:
        with pytest.raises(Closed, match="it sent a line that is too long"):
            channel.take()


def test_one_that_takes_nothing_is_given_up(ends, monkeypatch):
    monkeypatch.setattr(channel_module, "LONGEST_LINE", 1 << 20)
    channel = Channel(ends[0], trusted=True)
    message = {"kind": "x", "text": "y" * (1 << 20)}
    channel.send(message)
    with pytest.raises(Closed, match="it takes no more messages"):
        channel.send(message)
