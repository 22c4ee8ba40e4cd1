"""A launch that goes wrong: which rank is named, with which exit status, and that no process is left."""

import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
"""A process that SIGTERM does not end; it prints a line when that is so."""

DEADLINE = 60.0
"""Seconds after which a test that waits gives up."""


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
