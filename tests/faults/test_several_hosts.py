"""Launches on two hosts: that they come together, and what each tells when something breaks on one of them.

Hosts are network namespaces with a cable between them, where the system lets the tests make these. What needs no network of
its own runs as two launches on this host.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import uuid

import pytest

from allstep.launch.ports import HeldPort

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


class Hosts:
    """Two network namespaces and the cable between them."""

    def __init__(self) -> None:
        self._key = uuid.uuid4().hex[:8]
        self.names = [f"allstep-{self._key}-{side}" for side in "ab"]
        self.cables = [f"as{self._key}{side}" for side in "ab"]
        subnet = f"10.77.{int(self._key[:2], 16)}"
        self.addresses = [f"{subnet}.1", f"{subnet}.2"]

    def make(self) -> None:
        for name in self.names:
            run(IP, "netns", "add", name)
        (a, b), (name_a, name_b) = self.cables, self.names
        run(IP, "link", "add", a, "netns", name_a, "type", "veth", "peer", "name", b, "netns", name_b)
        for name, cable, address in zip(self.names, self.cables, self.addresses, strict=True):
            run(IP, "-n", name, "address", "add", f"{address}/24", "dev", cable)
            run(IP, "-n", name, "link", "set", "lo", "up")
            run(IP, "-n", name, "link", "set", cable, "up")

    def cut(self) -> None:
        """Pull the cable."""
        run(IP, "-n", self.names[0], "link", "set", self.cables[0], "down")

    def on(self, machine: int) -> tuple[str, ...]:
        """What to write before a command that runs on one of them."""
        return (IP, "netns", "exec", self.names[machine])

    def remove(self) -> None:
        for name in self.names:
            subprocess.run([IP, "netns", "delete", name], capture_output=True, check=False)


def run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    if IP is None:
        pytest.skip("no `ip` to make hosts with")
    made = Hosts()
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    yield made
    made.remove()


@pytest.fixture
def port():
    """A port of this host that nobody else gets meanwhile, and that a launcher can listen on."""
    with HeldPort() as held:
        yield held.port


def options(machine, address, port=29500, *more):
    where = ("--main_process_ip", address, "--main_process_port", str(port))
    return ("--num_machines", "2", "--machine_rank", str(machine), *where, *more)


class Both:
    """A launch on each of two hosts."""

    def __init__(self, launch, code):
        self.jobs = [launch(code, folder) for folder in ("a", "b")]

    def start(self, port, *more, hosts=None, ranks=(2, 1)):
        address = hosts.addresses[0] if hosts else "127.0.0.1"
        for machine, job in enumerate(self.jobs):
            before = hosts.on(machine) if hosts else ()
            job.start(*options(machine, address, port, *more), ranks=ranks[machine], before=before)
        return self

    def ready(self, counts=(2, 1)):
        return [job.ready(count) for job, count in zip(self.jobs, counts, strict=True)]

    def end(self):
        return [job.end() for job in self.jobs]

    def nothing_left(self):
        return [job.marked() for job in self.jobs] == [[], []]


@pytest.fixture
def both(launch):
    return lambda code: Both(launch, code)


# On hosts of their own.


@pytest.mark.long
def test_ranks_of_two_hosts_join_over_their_network(hosts, both):
    jobs = both("""
        import json, torch
        import allstep

        world = allstep.join()
        x = torch.full((3,), rank + 1.0)
        torch.distributed.all_reduce(x)
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
        with open(f"rank-{rank}", "w") as file:
            json.dump([x.tolist(), world.backend, {name: os.environ[name] for name in names}], file)
    """)
    jobs.start(29500, hosts=hosts)
    assert [status for status, _ in jobs.end()] == [0, 0]
    for rank, (machine, local, here) in enumerate([(0, 0, 2), (0, 1, 2), (1, 0, 1)]):
        total, backend, variables = json.loads((jobs.jobs[machine].folder / f"rank-{rank}").read_text())
        assert total == [6.0] * 3
        assert backend == "gloo"
        assert variables == {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(here),
            "WORLD_SIZE": "3",
            "GROUP_RANK": str(machine),
            "MASTER_ADDR": hosts.addresses[0],
            "GLOO_SOCKET_IFNAME": hosts.cables[machine],
        }


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_host_that_dies_ends_the_job_on_the_other_and_is_named(hosts, both, killed):
    jobs = both("ready()\nblock()").start(29500, hosts=hosts)
    jobs.ready()
    for pid in jobs.jobs[killed].marked():
        with contextlib.suppress(ProcessLookupError):  # with the launcher its ranks end
            os.kill(pid, signal.SIGKILL)
    other = jobs.jobs[1 - killed]
    status, errors = other.end()
    assert status == 1
    ranks = "ranks 0-1" if killed == 0 else "rank 2"
    first, *rest = other.report(errors)
    said = f"allstep: machine {killed} ({os.uname().nodename}, {ranks}) was lost: "
    assert first in (f"{said}the connection was closed from there", f"{said}its connection broke: Connection reset by peer")
    assert f"{'rank 2 was' if killed == 0 else 'ranks 0-1 were'} stopped because of it" in rest
    assert all(job.gone() for job in jobs.jobs)


@pytest.mark.long
def test_a_host_that_falls_silent_ends_the_job_on_both(hosts, both):
    jobs = both("ready()\nblock()").start(29500, hosts=hosts)
    jobs.ready()
    hosts.cut()
    for machine, (job, (status, errors)) in enumerate(zip(jobs.jobs, jobs.end(), strict=True)):
        assert status == 1
        lost = "machine 1 ({}, rank 2)" if machine == 0 else "machine 0 ({}, ranks 0-1)"
        said = f"allstep: {lost.format(os.uname().nodename)} was lost: nothing was heard from it for 10 s"
        assert job.report(errors)[0] == said
    assert jobs.nothing_left()


@pytest.mark.long
def test_a_first_host_that_does_not_answer_is_an_error_with_address_and_reason(hosts, launch):
    job = launch("block()")
    away = f"{hosts.addresses[0].rpartition('.')[0]}.9"
    job.start(*options(1, away), before=hosts.on(1))
    status, errors = job.end()
    assert status == 2
    assert f"Machine 0 cannot be reached at {away}:29500 from machine 1" in errors
    assert re.search("tried for 30 s: (No route to host|timed out)", errors)
    assert job.marked() == []


# As two launches on this host.


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.long), 2])
def test_both_hosts_report_the_rank_that_failed_first(both, port, failing):
    jobs = both(f"""
        def step(batch):
            raise ValueError(f"bad batch {{batch}}")

        if rank == {failing}:
            step(7)
        block()
    """).start(port)
    ends = jobs.end()
    assert [status for status, _ in ends] == [1, 1]
    machine = 0 if failing == 0 else 1
    for job, (_, errors) in zip(jobs.jobs, ends, strict=True):
        first, *rest = job.report(errors)
        host = os.uname().nodename
        assert first == f"allstep: rank {failing} of 3 failed first, on machine {machine} ({host}): ValueError: bad batch 7"
        assert rest[0].endswith("train.py:23")
        assert rest[2].endswith("train.py:20 in step")
        assert [rest[1], *rest[3:5]] == ["step(7)", 'raise ValueError(f"bad batch {batch}")', "exit code 1"]
        assert "were stopped because of it" in rest[5]
        if failing == 2:  # its output is in a file, on one host
            assert "allstep: last output of rank 2:" in errors.splitlines()
            assert "  | ValueError: bad batch 7" in errors.splitlines()
    assert jobs.nothing_left()


def test_a_host_whose_ranks_have_ended_hears_how_the_others_end(both, port):
    jobs = both("""
        if rank == 2:
            ready()
            sys.exit(0)
        while not os.path.exists("go"):
            time.sleep(0.01)
        raise ValueError("later")
    """).start(port)
    jobs.jobs[1].ready(1)
    deadline = time.monotonic() + 60
    while jobs.jobs[1].others():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (jobs.jobs[0].folder / "go").touch()
    ends = jobs.end()
    assert [status for status, _ in ends] == [1, 1]
    for job, (_, errors) in zip(jobs.jobs, ends, strict=True):
        first, *rest = job.report(errors)
        assert first.endswith("ValueError: later")
        assert "rank 2 had finished" in rest


def test_the_exit_status_is_the_same_on_both_hosts(both, port):
    jobs = both("sys.exit(3) if rank == 2 else block()").start(port)
    assert [status for status, _ in jobs.end()] == [3, 3]


@pytest.mark.parametrize("asked", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_signal_to_one_launcher_stops_the_ranks_of_both(both, port, asked):
    jobs = both("ready()\nblock()").start(port)
    jobs.ready()
    jobs.jobs[asked].process.send_signal(signal.SIGTERM)
    ends = jobs.end()
    assert [status for status, _ in ends] == [143, 143]
    for _, errors in ends:
        assert errors.rstrip().endswith("allstep: stopped by SIGTERM")
    assert f"SIGTERM on machine {asked} ({os.uname().nodename}): stopping 3 ranks" in ends[1 - asked][1]
    assert jobs.nothing_left()


def test_ranks_of_both_hosts_stop_in_order(both, port):
    jobs = both("""
        import json

        def note(**more):
            with open(os.environ["ALLSTEP_STOP_FILE"] + ".new", "w") as file:
                json.dump({"signal": 10, **more}, file)
            os.replace(os.environ["ALLSTEP_STOP_FILE"] + ".new", os.environ["ALLSTEP_STOP_FILE"])

        asked = []
        signal.signal(signal.SIGUSR1, lambda *_: asked.append(note()))
        ignore(signal.SIGTERM)
        ready()
        while not asked or not os.path.exists("go"):
            time.sleep(0.01)
        note(rank=2, step=7, checkpoint="out/checkpoint-7")
        sys.exit(143)
    """).start(port, "--grace_period", "1", "--monitor_interval", "0.05")
    jobs.ready()
    jobs.jobs[1].process.send_signal(signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        jobs.jobs[0].process.wait(timeout=1.5)  # the grace period, and half of it
    for job in jobs.jobs:
        (job.folder / "go").touch()
    for status, errors in jobs.end():
        assert status == 143
        assert "allstep: stopped by SIGUSR1 at step 7; checkpoint: out/checkpoint-7" in errors.splitlines()


def test_all_hosts_start_again_together(both, port):
    jobs = both("""
        count = os.environ["ALLSTEP_RESTART_COUNT"]
        names = ("ALLSTEP_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "ALLSTEP_MAX_RESTARTS")
        with open(f"rank-{rank}-{count}", "w") as file:
            file.write(" ".join(os.environ[name] for name in names))
        if count == "0":
            ready()
            while rank == 2 and not os.path.exists("go"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else block()
    """).start(port, "--max_restarts", "1")
    jobs.ready()
    (jobs.jobs[1].folder / "go").touch()
    ends = jobs.end()
    assert [status for status, _ in ends] == [0, 0]
    for _, errors in ends:
        assert "allstep: restart 1 of 1: rank 2 failed first: killed by signal 9 (SIGKILL)" in errors
    words = [
        [(jobs.jobs[rank // 2].folder / f"rank-{rank}-{count}").read_text().split() for rank in range(3)] for count in (0, 1)
    ]
    assert [len({tuple(rank) for rank in generation}) for generation in words] == [1, 1]
    (run_before, port_before, *_), (run_after, port_after, count, budget) = words[0][0], words[1][0]
    assert run_after == f"{run_before}.1"
    assert port_after != port_before
    assert (count, budget) == ("1", "1")


def test_strangers_and_launchers_of_other_jobs_end_nothing(both, launch, port):
    jobs = both("""
        ready()
        while not os.path.exists("go"):
            time.sleep(0.01)
    """)
    first, second = jobs.jobs
    first.start(*options(0, "127.0.0.1", port, "--run_id", "mine"), ranks=1)
    halves = [knock(port), knock(port, b'{"kind": "allstep launcher"')]
    for data in (os.urandom(5000), b"GET / HTTP/1.1\r\n\r\n", b"[" * 3000 + b"\n", b'{"kind": 7}\n', b"x" * 100_000):
        with knock(port, data) as stranger:
            assert closed(stranger)
    other = launch("block()", "other")
    other.start(*options(1, "127.0.0.1", port, "--run_id", "yours"), ranks=1)
    status, errors = other.end()
    assert status == 2
    assert "was started with --run_id yours" in errors
    second.start(*options(1, "127.0.0.1", port, "--run_id", "mine"), ranks=1)
    jobs.ready((1, 1))
    halves.append(knock(port, os.urandom(5000)))
    late = launch("block()", "late")
    late.start(*options(1, "127.0.0.1", port, "--run_id", "mine"), ranks=1)
    status, errors = late.end()
    assert status == 2
    assert f"--machine_rank 1 is taken by {os.uname().nodename} already: give each host its own" in errors
    for job in jobs.jobs:
        (job.folder / "go").touch()
    ends = jobs.end()
    assert [status for status, _ in ends] == [0, 0]
    assert "closed a connection from 127.0.0.1 that is not of this job" in ends[0][1]
    assert f"allstep: refused machine 1 ({os.uname().nodename}): it was started with --run_id yours" in ends[0][1]
    for half in halves:
        half.close()


def knock(port, data=b""):
    """A connection to the launcher, as soon as it listens, on which `data` was sent."""
    deadline = time.monotonic() + 60
    while True:
        try:
            stranger = socket.create_connection(("127.0.0.1", port), timeout=60)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            continue
        with contextlib.suppress(OSError):  # it does not read all of it
            stranger.sendall(data)
        return stranger


def closed(stranger):
    """Whether the other end closes the connection."""
    try:
        return stranger.recv(100) == b""
    except ConnectionResetError:
        return True
