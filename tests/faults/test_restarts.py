"""All ranks start again after a failure, as often as the budget allows, and the end tells of each."""

import os
import signal
import time

DEADLINE = 60.0

PLACE = """
    count = int(os.environ["ALLSTEP_RESTART_COUNT"])
    print(f"generation {count}", flush=True)
"""


def restarts(errors):
    return [line for line in errors.splitlines() if line.startswith("allstep: restart ")]


def test_a_job_that_fails_twice_finishes_within_its_budget(launch):
    job = launch(
        PLACE
        + """
    if count == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    open(f"printed-{rank}-{count}", "w").close()
    if count == 1 and rank == 0:
        while not os.path.exists("printed-1-1"):
            time.sleep(0.01)
        raise ValueError("bad luck")
    if count < 2:
        block()
    """
    )
    job.start("--max_restarts", "3", "--log_dir", "logs")
    status, errors = job.end()
    assert status == 0
    first, second = restarts(errors)
    assert first.startswith("allstep: restart 1 of 3: rank 1 failed first: killed by signal 9 (SIGKILL)")
    assert second == "allstep: restart 2 of 3: rank 0 failed first: ValueError: bad luck"
    assert errors.splitlines()[-3:] == [
        "allstep: the job finished, after these failures:",
        *(f"    {line.removeprefix('allstep: ')}" for line in (first, second)),
    ]
    assert (job.folder / "logs" / "rank-1.log").read_text() == "generation 0\ngeneration 1\ngeneration 2\n"
    assert job.marked() == []


def test_a_job_that_goes_on_failing_ends_with_its_last_failure_and_tells_the_earlier(launch):
    job = launch(PLACE + "    raise ValueError(f'bad luck {count}') if rank == 1 else block()")
    job.start("--max_restarts", "1")
    status, errors = job.end()
    assert status == 1
    first, *rest = job.report(errors)
    assert first.endswith("ValueError: bad luck 1")
    assert "restart 1 of 1: rank 1 failed first: ValueError: bad luck 0" in rest
    assert job.marked() == []


def test_nothing_of_the_last_generation_is_there_in_the_next(launch):
    """Neither processes, be they in sessions of their own, nor the port, nor the name of the job."""
    job = launch(
        PLACE
        + """
    with open(f"rank-{rank}-{count}", "w") as file:
        file.write(" ".join([os.environ["MASTER_PORT"], os.environ["ALLSTEP_RUN_ID"]]))
    if count == 0:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        with open(f"child-{rank}", "w") as file:
            file.write(str(child.pid))
        ready()
        block()
    with open(f"child-{rank}") as file:
        assert not os.path.exists("/proc/" + file.read())
    """
    )
    job.start("--max_restarts", "1")
    ranks = job.ready(2)
    os.kill(ranks[1][1], signal.SIGKILL)
    status, errors = job.end()
    assert status == 0, errors
    (port, name), (port_after, name_after) = ((job.folder / f"rank-1-{count}").read_text().split() for count in (0, 1))
    assert port != port_after
    assert name_after == f"{name}.1"
    assert job.marked() == []


def test_a_job_that_was_asked_to_stop_is_not_started_again(launch):
    job = launch(PLACE + "    ready()\n    block()")
    job.start("--max_restarts", "3")
    job.ready(2)
    job.process.send_signal(signal.SIGTERM)
    status, errors = job.end()
    assert status == 143
    assert restarts(errors) == []


def test_ctrl_c_between_failure_and_restart_ends_the_job(launch):
    job = launch(
        PLACE
        + """
    if rank == 0:
        ignore(signal.SIGTERM)
        ready()
        block()
    ready()
    while not os.path.exists("go"):
        time.sleep(0.01)
    raise ValueError("bad luck")
    """
    )
    job.start("--max_restarts", "3", "--grace_period", "60")
    _, (_, failing) = job.ready(2)
    (job.folder / "go").touch()
    deadline = time.monotonic() + DEADLINE
    while os.path.exists(f"/proc/{failing}"):  # until the launcher has seen its end
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.process.send_signal(signal.SIGINT)
    status, errors = job.end()
    assert status == 1
    assert restarts(errors) == []
    assert job.marked() == []
