"""A launch that goes wrong: which rank is named, with which exit status, and that no process is left."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
"""A process that SIGTERM does not end; it prints a line when that is so."""

DEADLINE = 60.0
"""Seconds after which a test that waits gives up."""


def eventually(condition):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# A rank fails by itself.


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_names_its_rank_and_ends_all(launch, failing):
    job = launch(f"""
        def step(batch):
            raise ValueError(f"bad batch {{batch}}")

        if rank == {failing}:
            step(7)
        ready()
        block()
    """)
    job.start(ranks=3)
    status, errors = job.end()
    assert status == 1
    first, *rest = job.report(errors)
    assert first == f"allstep: rank {failing} of 3 failed first, on {os.uname().nodename}: ValueError: bad batch 7"
    assert rest[:5] == [
        "at train.py:23",
        "step(7)",
        "at train.py:20 in step",
        'raise ValueError(f"bad batch {batch}")',
        "exit code 1",
    ]
    assert "were stopped because of it" in rest[5]
    assert job.marked() == []


def test_an_exit_code_is_the_exit_status(launch):
    job = launch("sys.exit(3) if rank == 1 else block()")
    job.start()
    status, errors = job.end()
    assert status == 3
    assert "rank 1 of 2 failed first" in job.report(errors)[0]
    assert job.marked() == []


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_named_with_its_signal(launch, killed):
    job = launch("ready()\nblock()")
    job.start()
    os.kill(job.ready(2)[killed][1], signal.SIGKILL)
    status, errors = job.end()
    assert status == 128 + signal.SIGKILL
    first, *rest = job.report(errors)
    assert f"rank {killed} of 2 failed first" in first
    assert "killed by signal 9 (SIGKILL): " in first
    assert "the launcher did not send it" in first
    assert f"rank {1 - killed} was stopped because of it" in rest
    assert job.marked() == []


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(launch):
    job = launch("""
        if rank == 0:
            ignore(signal.SIGTERM)
            ready()
            block()
        while not os.path.exists("go"):
            time.sleep(0.01)
        raise ValueError("bad")
    """)
    job.start("--grace_period", "0.5")
    job.ready(1)
    (job.folder / "go").touch()
    status, errors = job.end()
    assert status == 1
    assert "rank 1 of 2 failed first" in job.report(errors)[0]
    assert "rank 0 was stopped because of it" in job.report(errors)
    assert job.marked() == []


def test_a_rank_that_fails_and_then_hangs_does_not_hold_up_the_end(launch):
    job = launch("""
        if rank == 1:
            threading.Thread(target=block).start()
            raise ValueError("bad")
        block()
    """)
    job.start("--grace_period", "0.5")
    status, errors = job.end()
    assert status == 1
    first, *rest = job.report(errors)
    assert first.endswith("ValueError: bad")
    assert "did not end by itself after that, and was killed" in rest
    assert job.marked() == []


def test_a_broken_connection_is_not_taken_for_the_cause(launch):
    job = launch("""
        ready()
        if rank == 0:
            while not os.path.exists("go"):
                time.sleep(0.01)
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:59623")
        while not os.path.exists("go") or os.path.exists("/proc/" + open("go").read()):
            time.sleep(0.01)
        raise ValueError("the cause")
    """)
    job.start()
    (_, first_rank), _ = job.ready(2)
    (job.folder / "written").write_text(str(first_rank))
    (job.folder / "written").rename(job.folder / "go")
    status, errors = job.end()
    assert status == 1
    first, *rest = job.report(errors)
    assert first.endswith(f"rank 1 of 2 failed first, on {os.uname().nodename}: ValueError: the cause")
    assert "rank 0 failed as a consequence: RuntimeError: Connection closed by peer [127.0.0.1]:59623" in rest


@pytest.mark.long
def test_a_killed_rank_of_a_torch_program_is_named_and_not_who_noticed(launch):
    job = launch("""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        ready()
        while rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))
    """)
    job.start()
    os.kill(job.ready(2)[1][1], signal.SIGKILL)
    status, errors = job.end()
    assert status == 128 + signal.SIGKILL
    assert "rank 1 of 2 failed first" in job.report(errors)[0]
    assert job.marked() == []


@pytest.fixture
def little_memory():
    """A control group with 100 MiB; gives the command that puts what follows it there."""
    folder = Path("/sys/fs/cgroup/memory", f"allstep-{uuid.uuid4().hex[:8]}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(100 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"control groups cannot be made here: {error.strerror}")
    yield ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh")
    eventually(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def test_a_rank_that_the_kernel_killed_for_want_of_memory_is_told_so(launch, little_memory):
    job = launch("""
        ready()
        if rank == 0:
            block()
        taken = []
        while True:
            taken.append(bytearray(1 << 20))
    """)
    job.start(before=little_memory)
    status, errors = job.end()
    assert status == 137
    first, *_ = job.report(errors)
    assert "killed by signal 9 (SIGKILL): memory ran out: the kernel killed 1 process of its control group for it" in first


# Somebody stops the launcher.


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")]
)
def test_a_signal_to_the_launcher_ends_all_ranks(launch, number, said):
    job = launch("ready()\nblock()")
    job.start()
    job.ready(2)
    job.process.send_signal(number)
    status, errors = job.end()
    assert status == 128 + number
    assert errors.rstrip().split("\n")[-1] == f"allstep: stopped by {said}"
    assert "Traceback" not in errors
    assert job.marked() == []


def test_ctrl_c_at_a_terminal_ends_all_ranks(launch):
    job = launch("ready()\nblock()")
    ours, theirs = os.openpty()
    take_terminal = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
    )
    job.start(
        before=(sys.executable, "-c", take_terminal),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        job.ready(2)
        os.write(ours, b"\x03")
        printed = b""
        while True:
            try:
                printed += os.read(ours, 65536)
            except OSError:  # the last process that had the terminal has ended
                break
        assert job.process.wait(timeout=DEADLINE) == 130
    finally:
        os.close(ours)
    assert printed.decode().split()[-3:] == ["stopped", "by", "Ctrl-C"]
    assert "Traceback" not in printed.decode()
    assert job.marked() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_and_children_that_ignore_the_signal_are_killed(launch, number):
    job = launch(f"""
        ignore(signal.SIGINT, signal.SIGTERM)
        child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], stdout=subprocess.PIPE)
        child.stdout.readline()
        ready()
        block()
    """)
    job.start("--grace_period", "0.5")
    job.ready(2)
    job.process.send_signal(number)
    status, _ = job.end()
    assert status == 128 + number
    assert job.marked() == []


def test_a_rank_asked_to_stop_can_end_in_order_and_its_children_are_not_taken_from_it(launch):
    job = launch("""
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

        def save(number, frame):
            child.communicate(b"done\\n")
            with open(f"saved-{rank}", "w") as file:
                file.write(str(child.returncode))
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)
        ready()
        block()
    """)
    job.start("--grace_period", "60")
    job.ready(2)
    job.process.send_signal(signal.SIGTERM)
    status, _ = job.end()
    assert status == 128 + signal.SIGTERM
    assert [(job.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == ["0", "0"]
    assert job.marked() == []


def test_ctrl_c_works_where_a_shell_started_the_launcher_with_it_ignored(launch):
    job = launch("ready()\nblock()")
    job.start(before=("sh", "-c", 'trap "" INT; exec "$@"', "sh"))
    job.ready(2)
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert job.marked() == []


def test_nohup_holds(launch):
    job = launch("""
        ready()
        while not os.path.exists("go"):
            time.sleep(0.01)
    """)
    job.start(before=("sh", "-c", 'trap "" HUP; exec "$@"', "sh"))
    job.ready(2)
    job.process.send_signal(signal.SIGHUP)
    (job.folder / "go").touch()
    assert job.end()[0] == 0


def test_ranks_end_with_a_launcher_that_is_killed(launch):
    job = launch("ready()\nignore(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)\nblock()")
    job.start()
    job.ready(2)
    job.process.kill()
    job.process.wait(timeout=DEADLINE)
    assert job.gone()


# Processes that ranks start.

GRANDCHILD = """
    child = subprocess.Popen([sys.executable, "-c", {code!r}], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    child.stdout.readline()
    ready(child.pid)
"""
STUBBORN = GRANDCHILD.format(code=SLEEPER)
WILLING = GRANDCHILD.format(code="import time; print(flush=True); time.sleep(600)")


@pytest.mark.parametrize("child", [WILLING, STUBBORN], ids=["willing", "stubborn"])
def test_children_of_failed_and_of_stopped_ranks_end(launch, child):
    job = launch(
        textwrap.dedent(child) + "while not os.path.exists('go'): time.sleep(0.01)\nif rank == 1: os._exit(5)\nblock()"
    )
    job.start("--grace_period", "0.5")
    job.ready(2)
    (job.folder / "go").touch()
    status, errors = job.end()
    assert status == 5
    assert "rank 1 of 2 failed first" in job.report(errors)[0]
    assert job.marked() == []


@pytest.mark.parametrize("child", [WILLING, STUBBORN], ids=["willing", "stubborn"])
def test_children_of_a_killed_rank_end(launch, child):
    job = launch(textwrap.dedent(child) + "ready()\nblock()")
    job.start("--grace_period", "0.5")
    pids = [pid for rank, pid in job.ready(4) if rank == 1]
    ranks = {pid for pid in pids if b"allstep.launch.worker" in Path("/proc", str(pid), "cmdline").read_bytes()}
    os.kill(ranks.pop(), signal.SIGKILL)
    assert job.end()[0] == 128 + signal.SIGKILL
    assert job.marked() == []


@pytest.mark.parametrize("child", [WILLING, STUBBORN], ids=["willing", "stubborn"])
def test_children_left_after_success_end_and_are_told(launch, child):
    job = launch(textwrap.dedent(child) + "os._exit(0)")
    job.start("--grace_period", "0.5")
    status, errors = job.end()
    assert status == 0
    assert errors.rstrip().endswith("allstep: processes that ranks 0-1 left running were ended")
    assert job.marked() == []


def test_a_child_that_ends_soon_after_its_rank_is_left_in_peace(launch):
    job = launch("""
        code = "import sys; print(flush=True); sys.stdin.read(); open('written', 'w').close()"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        os._exit(0)
    """)
    job.start(ranks=1)
    status, errors = job.end()
    assert status == 0
    assert "left running" not in errors
    assert (job.folder / "written").exists()


def test_grandchildren_in_sessions_of_their_own_end_with_a_launcher_that_is_killed(launch):
    job = launch(f"""
        child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        inner = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
        second = subprocess.Popen([sys.executable, "-c", inner, {SLEEPER!r}], stdout=subprocess.PIPE, start_new_session=True)
        second.stdout.readline()
        second.wait()  # what it started has no parent here any more
        ignore(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        ready()
        block()
    """)
    job.start()
    job.ready(2)
    assert len(job.marked()) == 7  # the launcher; of each rank itself, its child and its grandchild
    job.process.kill()
    assert job.gone()


def test_what_left_the_session_of_a_failed_rank_ends_too(launch):
    job = launch(f"""
        child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        os._exit(5) if rank == 1 else block()
    """)
    job.start()
    status, _ = job.end()
    assert status == 5
    assert job.marked() == []


# A rank leaves without the others.


def test_a_rank_that_leaves_early_is_named_as_the_cause(launch):
    job = launch("""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            os._exit(0)  # torch at times aborts where one leaves with its group
        dist.all_reduce(torch.ones(1))
    """)
    job.start()
    status, errors = job.end()
    assert status == 1
    first, *rest = job.report(errors)
    said = "rank 1 of 2 left early, on {}: exit code 0, while others still trained"
    assert first == f"allstep: {said.format(os.uname().nodename)}"
    assert any(line.startswith("rank 0 failed as a consequence: ") for line in rest)


# Somebody asks ranks to stop that can do so in order.

POLITE = """
    import json

    def note(**more):
        aside = os.environ["ALLSTEP_STOP_FILE"] + ".new"
        with open(aside, "w") as file:
            json.dump({"signal": asked[0], **more}, file)
        os.replace(aside, os.environ["ALLSTEP_STOP_FILE"])

    def acknowledge(number, frame):
        if not asked:
            asked.append(number)
            note()
            open(f"asked-{rank}", "w").close()

    asked = []
    signal.signal(signal.SIGTERM, acknowledge)
    signal.signal(signal.SIGUSR1, acknowledge)
    ready()
    while not os.path.exists("go"):
        time.sleep(0.01)
"""
"""Says that it will stop, and waits for a file before it does."""
SAVES = """
    note(rank=1, step=120, checkpoint="out/checkpoint-120")
    sys.exit(143)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.long)])
def test_ranks_that_stop_in_order_get_the_time_that_they_need(launch, number):
    job = launch(POLITE + SAVES)
    job.start("--grace_period", "1", "--monitor_interval", "0.05")
    job.ready(2)
    job.process.send_signal(number)
    eventually(lambda: all((job.folder / f"asked-{rank}").exists() for rank in (0, 1)))
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(timeout=1.5)  # the grace period, and half of it
    (job.folder / "go").touch()
    status, errors = job.end()
    assert status == 143
    assert f"allstep: stopped by {number.name} at step 120; checkpoint: out/checkpoint-120" in errors.splitlines()
    assert job.marked() == []


def test_ranks_that_stop_in_order_are_killed_after_a_second_signal(launch):
    job = launch(POLITE)
    job.start("--grace_period", "1", "--monitor_interval", "0.05")
    job.ready(2)
    job.process.send_signal(signal.SIGTERM)
    eventually(lambda: all((job.folder / f"asked-{rank}").exists() for rank in (0, 1)))
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(timeout=0.7)  # a second that comes at once is taken for the first
    job.process.send_signal(signal.SIGTERM)
    status, errors = job.end()
    assert status == 143
    assert "allstep: stopped by SIGTERM" in errors.splitlines()
    assert job.marked() == []


def test_a_signal_to_one_rank_stops_all_in_order_and_is_no_failure(launch):
    job = launch(POLITE.replace('os.path.exists("go")', 'os.path.exists("asked-1")') + "    asked = [15]" + SAVES)
    job.start()
    os.kill(job.ready(2)[1][1], signal.SIGTERM)
    status, errors = job.end()
    assert status == 143
    said = "allstep: stopped by SIGTERM (sent to rank 1) at step 120; checkpoint: out/checkpoint-120"
    assert said in errors.splitlines()


def test_a_stop_that_goes_wrong_is_a_failure(launch):
    job = launch(POLITE + "    raise OSError(28, 'No space left on device')")
    job.start("--monitor_interval", "0.05")
    job.ready(2)
    job.process.send_signal(signal.SIGTERM)
    eventually(lambda: all((job.folder / f"asked-{rank}").exists() for rank in (0, 1)))
    (job.folder / "go").touch()
    status, errors = job.end()
    assert status == 1
    assert "OSError: [Errno 28] No space left on device" in job.report(errors)[0]


def test_sigusr2_is_for_the_ranks_alone(launch):
    job = launch("""
        signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
        ready()
        block()
    """)
    job.start()
    job.ready(2)
    job.process.send_signal(signal.SIGUSR2)
    status, errors = job.end()
    assert status == 0
    assert "stop" not in errors


def test_output_of_all_ranks_can_be_shown_with_the_rank_in_front(launch):
    job = launch("print(f'hello from {rank}', flush=True)\nsys.stdout.write('no end') if rank == 1 else None")
    job.start("--tee")
    status, errors = job.end()
    assert status == 0
    assert [line for line in errors.splitlines() if line.startswith("[")] == ["[rank 1] hello from 1", "[rank 1] no end"]


def test_a_terminal_that_takes_no_more_does_not_hold_up_the_launcher(launch):
    job = launch("""
        if rank == 1:
            for number in range(20_000):
                print("x" * 50, number)
            open("written", "w").close()
            while not os.path.exists("go"):
                time.sleep(0.01)
            os._exit(3)
        block()
    """)
    job.start("--tee", "--log_dir", "logs")
    eventually((job.folder / "written").exists)
    (job.folder / "go").touch()
    log = job.folder / "logs" / "rank-1.log"
    eventually(lambda: job.others() == [])  # it has ended the ranks, though nobody has read a line
    status, errors = job.end()
    assert status == 3
    assert [line for line in errors.splitlines() if line.startswith("[")] == [
        f"[rank 1] {line}" for line in log.read_text().splitlines()
    ]


# Many launches.

MEET = """
    import socket

    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen()
            connection, _ = listener.accept()
            assert connection.recv(100).decode() == os.environ["ALLSTEP_RUN_ID"]
    else:
        while True:
            try:
                connection = socket.create_connection(place)
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        connection.sendall(os.environ["ALLSTEP_RUN_ID"].encode())
"""
JOIN = """
    import allstep, torch

    allstep.join()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert total.item() == 2
"""


@pytest.mark.parametrize("code", [MEET, pytest.param(JOIN, marks=pytest.mark.long)], ids=["sockets", "torch"])
def test_twenty_launches_at_once_do_not_disturb_one_another(launch, code):
    jobs = [launch(code, f"job-{number}") for number in range(20)]
    for job in jobs:
        job.start()
    assert [job.process.wait(timeout=10 * DEADLINE) for job in jobs] == [0] * 20
