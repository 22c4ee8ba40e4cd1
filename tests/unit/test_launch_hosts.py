"""The launchers of several hosts: who is let in, what they tell one another, and which interface leads to them."""

import contextlib
import json
import os
import random
import signal
import socket
import struct
import threading
from dataclasses import replace

import pytest

from allstep.errors import ArgumentsError
from allstep.launch import first, other
from allstep.launch.agent import launch
from allstep.launch.door import Hello, refusal
from allstep.launch.failures import report
from allstep.launch.generation import Generation
from allstep.launch.job import JobState, Machine, RankState, Request, StopNote, shifted
from allstep.launch.network import interface_addresses, interface_of, listen
from allstep.launch.ports import HeldPort
from allstep.launch.record import FailureRecord, UserFrame
from allstep.launch.spec import LaunchSpec
from allstep.launch.views import View, lost, merged, told

OWN = Hello(machine_rank=0, num_machines=3, ranks=2, host="first", run_id=None)
NEW = replace(OWN, machine_rank=1, host="second")


def test_a_launcher_of_the_same_job_is_let_in():
    assert Hello.of(json.loads(json.dumps(NEW.message()))) == NEW
    assert refusal(NEW, OWN, {0: "first"}) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": "0.0.1"}, "it runs allstep 0.0.1, and machine 0 (first) allstep"),
        ({"run_id": "x"}, "it was started with --run_id x, and machine 0 (first) otherwise: it belongs to another job"),
        ({"num_machines": 2}, "it was started with --num_machines 2, and machine 0 (first) with 3"),
        ({"machine_rank": 2}, "--machine_rank 2 is taken by third already: give each host its own"),
        ({"machine_rank": 0}, "--machine_rank 0 is taken by first already: give each host its own"),
        ({"machine_rank": 3}, "--machine_rank 3 with 2 ranks cannot be"),
        ({"ranks": 0}, "--machine_rank 1 with 0 ranks cannot be"),
    ],
)
def test_others_are_told_why_not(change, reason):
    said = refusal(replace(NEW, **change), OWN, {0: "first", 2: "third"})
    assert said is not None
    assert said.startswith(reason)


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "states"},
        {"kind": "allstep launcher"},
        {**NEW.message(), "ranks": "2"},
        {**NEW.message(), "ranks": True},
        {**NEW.message(), "machine_rank": -1},
        {**NEW.message(), "machine_rank": 1 << 70},
        {**NEW.message(), "host": "a\x1b[2J"},
        {**NEW.message(), "run_id": ["x"]},
        {**NEW.message(), "version": None},
    ],
)
def test_a_stranger_is_no_launcher(message):
    assert Hello.of(message) is None


# What they tell one another.


def state(rank, machine, **more):
    return RankState(rank=rank, pid=100 + rank, machine=machine, **more)


RECORD = FailureRecord(
    rank=1,
    host="b",
    pid=9,
    error="ValueError",
    message="bad",
    frames=(UserFrame(file="t.py", line=3, function="main", source="go()"),),
    traceback="long",
    time=52.0,
)
HOSTS = (Machine(machine=0, host="a"), Machine(machine=1, host="b"), Machine(machine=2, host="c"))
JOB = JobState(ranks=(state(0, 0), state(1, 1), state(2, 2)), machines=HOSTS)


def through_the_wire(job, machines, *, sent_at, now, tail=()):
    return View.of(json.loads(json.dumps({"now": sent_at, **told(job, tail)})), machines, now)


def test_what_one_tells_the_others_know_by_their_own_clock():
    failed = state(
        1, 1, exit_code=1, ended_at=52.5, failed_at=52.5, record=RECORD, stop=StopNote(signal=15), sent=(15,), received=(15,)
    )
    request = Request(signal=15, time=51.0, machine=1)
    there = replace(JOB, machine=1, ranks=(JOB.ranks[0], failed, JOB.ranks[2]), requests=(request,), stopped_at=52.6)
    view = through_the_wire(there, [1], sent_at=53.0, now=1053.0, tail=("last",))
    here = merged(JOB, [view])
    assert here.ranks == (JOB.ranks[0], shifted(replace(failed, record=replace(RECORD, traceback="")), 1000.0), JOB.ranks[2])
    assert here.requests == (replace(request, time=1051.0),)
    assert here.stopped_at == pytest.approx(1052.6)
    assert view.tail == ("last",)


def test_nobody_knows_better_about_the_ranks_of_a_host_than_its_launcher():
    wrong = replace(JOB, ranks=tuple(replace(each, exit_code=3) for each in JOB.ranks))
    view = through_the_wire(wrong, [1, 2], sent_at=0.0, now=0.0)
    assert [each.exit_code for each in merged(JOB, [view]).ranks] == [None, 3, 3]


def test_requests_of_all_hosts_are_in_the_order_of_their_times_and_none_twice():
    mine = Request(signal=2, time=5.0)
    job = replace(JOB, requests=(mine,))
    theirs = replace(JOB, machine=1, requests=(Request(signal=15, time=4.0, machine=1), mine))
    view = through_the_wire(theirs, [1], sent_at=0.0, now=0.0)
    once = merged(job, [view])
    assert [request.machine for request in once.requests] == [1, 0]
    assert merged(once, [view]) == once


def test_what_still_ran_on_a_lost_host_is_lost_with_it():
    ended = replace(JOB, ranks=(*JOB.ranks, state(3, 1, exit_code=0, ended_at=1.0)))
    view = lost(ended, [1], heard=2.0, now=12.0, because="it fell silent")
    after = merged(ended, [view])
    assert [each.lost_at for each in after.ranks] == [None, 2.0, None, None]
    assert after.ranks[1].failed_at == 12.0
    assert after.machines[1] == Machine(machine=1, host="b", lost_at=2.0, lost_because="it fell silent")


def test_messages_that_are_none_are_errors_that_are_caught():
    message = json.loads(json.dumps({"now": 1.0, **told(JOB)}))
    noise = random.Random(0)
    for _ in range(300):
        broken = json.loads(json.dumps(message))
        where = noise.choice(list(broken))
        broken[where] = noise.choice([None, 3, "x", [3], [None], [{}], [{"machine": 1}], {"a": 1}])
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            View.of(broken, [1], 2.0)


def test_a_generation_is_the_same_on_all_hosts_but_for_its_place():
    one = Generation(
        number=1,
        run_id="x",
        counts=(2, 1),
        hosts=("a", "b"),
        machine=0,
        master_addr="10.0.0.1",
        master_port=7,
        max_restarts=3,
    )
    two = Generation.of(json.loads(json.dumps(one.told())), machine=1, master_addr="172.16.0.1")
    assert two == replace(one, machine=1, master_addr="172.16.0.1")
    assert (list(one.here), list(two.here), two.world_size, two.name) == ([0, 1], [2], 3, "x.1")
    worker = two.worker(2)
    assert (worker.rank, worker.local_rank, worker.world_size, worker.local_world_size) == (2, 0, 3, 1)


# Addresses.

ADDRESSES = [("lo", "127.0.0.1"), ("eth0", "10.0.0.2"), ("eth0:1", "10.0.1.2"), ("lo", "::1"), ("ib0", "fe80::1")]


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.2", "eth0"),
        ("10.0.1.2", "eth0"),
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),
        ("::1", "lo"),
        ("fe80::1%ib0", "ib0"),
        ("10.0.0.3", None),
    ],
)
def test_the_interface_is_the_one_that_has_the_address(address, name):
    assert interface_of(address, ADDRESSES) == name


def test_the_interfaces_of_this_host_are_known():
    assert ("lo", "127.0.0.1") in interface_addresses()


def test_an_address_that_is_not_of_this_host_is_an_error_that_says_which_are():
    with pytest.raises(ArgumentsError, match=r"cannot listen on 192.0.2.1:29500: .*this host has .*--main_process_port"):
        listen("192.0.2.1", 29500)


def test_an_own_name_that_only_this_host_can_reach_is_refused(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))])
    with pytest.raises(ArgumentsError, match=r"main_process_ip='node1' stands for 127.0.1.1 on this host"):
        listen("node1", 0)


# Hosts that do not come.


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    with HeldPort() as held:
        yield LaunchSpec(
            script=str(tmp_path / "train.py"), num_machines=3, main_process_ip="127.0.0.1", main_process_port=held.port
        )


def test_machine_0_says_for_whom_it_waits_and_gives_up(spec, monkeypatch):
    monkeypatch.setattr(first, "GATHER", 0.3)
    monkeypatch.setattr(first, "REMIND", (0.0, 60.0))
    monkeypatch.setattr(first, "TICK", 0.05)
    said = []
    with pytest.raises(ArgumentsError, match=r"machines 1, 2 of 3 did not come to 127\.0\.0\.1:\d+ within 0.3 s"):
        launch(spec, say=said.append)
    assert said == [f"allstep: waiting at 127.0.0.1:{spec.main_process_port} for machines 1, 2 of 3"]


def test_a_machine_0_that_is_not_there_is_an_error_with_address_and_reason(spec, monkeypatch):
    monkeypatch.setattr(other, "CONNECT", 0.3)
    place = f"127.0.0.1:{spec.main_process_port}"
    with pytest.raises(ArgumentsError, match=rf"Machine 0 cannot be reached at {place} .* for 0.3 s: Connection refused"):
        launch(replace(spec, machine_rank=1), say=print)


def test_another_program_on_the_port_is_told_from_machine_0(spec):
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", spec.main_process_port))
        listener.listen()

        def answer():
            connection, _ = listener.accept()
            connection.sendall(b"220 mail server ready\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ArgumentsError, match="went away before the ranks were started: it sent what is no message"):
            launch(replace(spec, machine_rank=1), say=print)
        thread.join()


def test_a_signal_while_waiting_for_others_ends_the_launch(spec, monkeypatch):
    monkeypatch.setattr(first, "REMIND", (0.0, 60.0))
    result = launch(spec, say=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert result.exit_code == 143
    assert report(result) == "allstep: stopped by SIGTERM"
    assert result.ranks == ()


def test_a_connection_that_is_reset_at_the_door_ends_nothing(spec, monkeypatch):
    monkeypatch.setattr(first, "GATHER", 0.5)
    monkeypatch.setattr(first, "REMIND", (0.0, 60.0))
    monkeypatch.setattr(first, "TICK", 0.05)

    def knock(_):
        with socket.create_connection(("127.0.0.1", spec.main_process_port)) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset instead of an end

    said = []
    with pytest.raises(ArgumentsError, match="did not come"):
        launch(spec, say=lambda line: (said.append(line), knock(line) if len(said) == 1 else None))
    assert "that is not of this job: its connection broke" in said[1]
