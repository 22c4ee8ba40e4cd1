import signal
from dataclasses import replace

import pytest

from allstep.launch.failures import cause, report
from allstep.launch.job import JobState, Machine, RankState, Request, StopNote
from allstep.launch.record import FailureRecord, UserFrame
from allstep.launch.result import LaunchResult

FRAMES = (
    UserFrame(file="/home/me/train.py", line=9, function="<module>", source="main()"),
    UserFrame(file="/home/me/train.py", line=4, function="main", source="step(batch)"),
)


def record(rank, time=10.0, **more):
    fields = {"error": "ValueError", "message": "bad sample 7", "frames": FRAMES, **more}
    return FailureRecord(rank=rank, host="node1", pid=1, traceback="...", time=time, **fields)


def ended(rank, code, at=10.0, **more):
    failed_at = at if code != 0 else None
    return RankState(rank=rank, pid=100 + rank, exit_code=code, ended_at=at, failed_at=failed_at, **more)


def result(*ranks, logs=(), tail=(), **more):
    job = JobState(ranks=ranks, **more)
    return LaunchResult.of(job, host="node1", started_at=1.0, ended_at=20.0, logs=logs, tail=tail)


STOPPED = {"sent": (signal.SIGTERM,), "received": (signal.SIGTERM,)}


def test_the_whole_report_of_an_exception():
    end = result(
        ended(0, -signal.SIGTERM, at=10.1, **STOPPED),
        ended(1, 1, record=record(1)),
        stopped_at=10.0,
        tail=("step 1", "ValueError: bad sample 7"),
        logs=("/tmp/x/rank-1.log",),
    )
    assert end.exit_code == 1
    assert report(end, "/home/me").splitlines() == [
        "allstep: last output of rank 1:",
        "  | step 1",
        "  | ValueError: bad sample 7",
        "",
        "allstep: rank 1 of 2 failed first, on node1: ValueError: bad sample 7",
        "    at train.py:9",
        "        main()",
        "    at train.py:4 in main",
        "        step(batch)",
        "    exit code 1",
        "    rank 0 was stopped because of it",
        "    output kept: /tmp/x/rank-1.log",
    ]


def test_a_job_that_went_well_has_nothing_to_report():
    end = result(ended(0, 0), ended(1, 0))
    assert end.exit_code == 0
    assert end.first_failure is None
    assert report(end) == ""


def test_a_single_rank_does_not_fail_first():
    assert "allstep: rank 0 of 1 failed, on node1: ValueError" in report(result(ended(0, 1, record=record(0))))


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        (-9, 137, "killed by signal 9 (SIGKILL): perhaps the system ran out of memory; the launcher did not send it"),
        (-12, 140, "killed by signal 12 (SIGUSR2)"),
        (-11, 139, "killed by signal 11 (SIGSEGV): a crash in native code"),
        (-40, 168, "killed by signal 40"),
        (7, 7, "exit code 7, without an exception"),
        (130, 130, "exit code 130, interrupted by SIGINT"),
    ],
)
def test_a_rank_that_left_no_record_is_described_by_its_end(code, status, text):
    end = result(ended(0, -15, **STOPPED), ended(1, code, at=9.0), stopped_at=9.5)
    assert end.exit_code == status
    assert f"rank 1 of 2 failed first, on node1: {text}" in report(end)


def test_a_rank_that_hung_after_its_exception_says_so():
    end = result(ended(0, -9, at=15.0, record=record(0), received=(signal.SIGKILL,)), stopped_at=10.0)
    assert end.exit_code == 1
    assert "did not end by itself after that, and was killed" in report(end)


def test_the_other_ranks_are_told_in_groups():
    closed = "[/build/pair.cc:553] Connection closed by peer [127.0.0.1]:59623"
    end = result(
        ended(0, 1, at=10.2, record=record(0, 10.2, error="RuntimeError", message=closed)),
        ended(1, 1, at=10.0, record=record(1)),
        ended(2, -15, at=10.3, **STOPPED),
        ended(3, -15, at=10.3, **STOPPED),
        ended(4, 0, at=9.0),
        ended(5, -15, at=10.3, **STOPPED),
        ended(6, 1, at=10.1, record=record(6, 10.1)),
        stopped_at=10.25,
    )
    lines = [line.strip() for line in report(end).splitlines()]
    assert "rank 6 failed too, with the same error" in lines
    assert "rank 0 failed as a consequence: RuntimeError: Connection closed by peer [127.0.0.1]:59623" in lines
    assert "ranks 2-3 and 5 were stopped because of it" in lines
    assert "rank 4 had finished" in lines


def test_a_long_message_keeps_its_first_and_last_lines():
    message = "\n".join(f"line {i}" for i in range(100))
    text = report(result(ended(0, 1, record=record(0, message=message))))
    assert "ValueError: line 0" in text
    assert "line 99" in text
    assert "line 50" not in text


@pytest.mark.parametrize(
    ("number", "status", "text"),
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM"), (signal.SIGHUP, 129, "SIGHUP")],
)
def test_a_job_that_was_stopped_on_request_is_no_failure(number, status, text):
    end = result(
        ended(0, 130, at=12.0),
        ended(1, 130, at=12.0),
        requests=(Request(signal=number, time=11.0),),
        logs=("/tmp/x/rank-1.log",),
    )
    assert end.exit_code == status
    assert report(end).splitlines() == [f"allstep: stopped by {text}", "    output kept: /tmp/x/rank-1.log"]


def test_processes_that_were_left_behind_are_told():
    end = result(ended(0, 0), ended(1, 0, sent=(signal.SIGTERM,)), stopped_at=11.0)
    assert end.exit_code == 0
    assert report(end) == "allstep: processes that rank 1 left running were ended"


def test_a_process_that_could_not_be_ended_is_told():
    stuck = RankState(rank=0, pid=100, sent=(15, 9))
    assert "rank 0 could not be ended" in report(result(stuck, ended(1, 3), stopped_at=11.0))


def test_a_result_survives_json():
    end = result(ended(0, -15, **STOPPED), ended(1, 1, record=record(1)), stopped_at=10.0, tail=("a",), logs=("b",))
    assert LaunchResult.from_json(end.to_json()) == end
    assert LaunchResult.from_json(replace(end, ranks=()).to_json()) == replace(end, ranks=())


@pytest.mark.parametrize(
    ("kills", "text"),
    [
        (0, "the launcher did not send it, and its control group counts no kill for want of memory"),
        (1, "memory ran out: the kernel killed 1 process of its control group for it"),
        (3, "memory ran out: the kernel killed 3 processes of its control group for it"),
    ],
)
def test_a_kill_for_want_of_memory_is_told_for_certain_where_the_kernel_counts(kills, text):
    end = result(ended(0, -9, oom_kills=kills))
    assert report(end).splitlines()[0].endswith(f"killed by signal 9 (SIGKILL): {text}")


def test_a_rank_that_left_early_is_the_cause_of_broken_connections():
    closed = record(0, 10.0, error="RuntimeError", message="Connection closed by peer")
    end = result(ended(0, 1, record=closed), ended(1, 0, at=9.0))
    assert end.exit_code == 1
    assert report(end).splitlines() == [
        "allstep: rank 1 of 2 left early, on node1: exit code 0, while others still trained",
        "    rank 0 failed as a consequence: RuntimeError: Connection closed by peer",
    ]
    end = result(ended(0, 1, record=closed), ended(1, 143, at=9.0, stop=StopNote(signal=10)))
    assert "rank 1 of 2 left early, on node1: exit code 143, as SIGUSR1 had asked it to" in report(end)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_in_order_tells_step_and_checkpoint(number):
    note = StopNote(signal=number, rank=1, step=120, checkpoint="out/checkpoint-120")
    ranks = ended(0, 143, stop=StopNote(signal=number)), ended(1, 143, stop=note)
    name = signal.Signals(number).name
    end = result(*ranks)
    assert end.exit_code == 143
    assert report(end) == f"allstep: stopped by {name} (sent to rank 1) at step 120; checkpoint: out/checkpoint-120"
    end = result(*ranks, requests=(Request(signal=number, time=9.0),))
    assert end.exit_code == 143
    assert report(end) == f"allstep: stopped by {name} at step 120; checkpoint: out/checkpoint-120"
    unsaved = ended(0, 143, stop=StopNote(signal=number, step=3))
    assert report(result(unsaved)) == f"allstep: stopped by {name} at step 3; checkpoint: none"


HOSTS = (Machine(machine=0, host="node1"), Machine(machine=1, host="node2", lost_at=2.0, lost_because="it fell silent"))


def lost(rank):
    return RankState(rank=rank, pid=0, machine=1, lost_at=2.0, failed_at=12.0)


def test_a_lost_host_is_named_with_its_ranks():
    stopped = ended(0, -15, at=12.1, **STOPPED)
    end = result(stopped, lost(1), lost(2), machines=HOSTS, stopped_at=12.0)
    assert end.exit_code == 1
    assert report(end).splitlines() == [
        "allstep: machine 1 (node2, ranks 1-2) was lost: it fell silent",
        "    rank 0 was stopped because of it",
    ]
    assert not end.calls_for_restart


def test_on_several_hosts_a_failure_is_told_with_its_host():
    end = result(
        ended(0, -15, at=10.1, **STOPPED),
        replace(ended(1, 1, record=record(1)), machine=1),
        machines=(HOSTS[0], Machine(machine=1, host="node2")),
        stopped_at=10.0,
    )
    assert "rank 1 of 2 failed first, on machine 1 (node2): ValueError: bad sample 7" in report(end)
    assert cause(end) == "rank 1 failed first: ValueError: bad sample 7"
    assert end.calls_for_restart


def test_earlier_failures_are_part_of_every_end():
    earlier = ("restart 1 of 2: rank 1 failed first: exit code 3",)
    failed = replace(result(ended(0, 1, record=record(0))), earlier=earlier)
    assert f"    {earlier[0]}" in report(failed).splitlines()
    finished = replace(result(ended(0, 0)), earlier=earlier)
    assert report(finished).splitlines() == ["allstep: the job finished, after these failures:", f"    {earlier[0]}"]


@pytest.mark.parametrize(
    ("ranks", "more", "expected"),
    [
        ([ended(0, 1, record=record(0))], {}, True),
        ([ended(0, 0)], {}, False),
        ([ended(0, 1, at=9.0, record=record(0, 9.0))], {"requests": (Request(signal=2, time=10.0),)}, False),
        ([RankState(rank=0, pid=1, record=record(0), failed_at=10.0)], {}, False),
        ([ended(0, 143, stop=StopNote(signal=15)), ended(1, 1, record=record(1))], {}, False),
    ],
    ids=["a failure", "none", "asked to stop", "a process that cannot be ended", "one rank was asked to stop"],
)
def test_whether_starting_again_may_help(ranks, more, expected):
    assert result(*ranks, **more).calls_for_restart is expected


def test_a_result_of_several_hosts_survives_json():
    note = StopNote(signal=15, rank=0, step=1, checkpoint="c")
    end = result(ended(0, 143, stop=note), lost(1), machines=HOSTS)
    assert LaunchResult.from_json(end.to_json()) == end
