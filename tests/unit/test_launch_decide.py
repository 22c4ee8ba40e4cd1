import signal
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.launch.decide import GIVE_UP, Finish, Forward, Kill, Stop, Wait, decide
from allstep.launch.job import JobState, Machine, RankState, Request, StopNote
from allstep.launch.record import FailureRecord
from allstep.launch.verdict import SETTLE, Outcome, first_failure, interrupted_by, outcome, stop_note

GRACE = 5.0


def record(rank, time, error="ValueError", message="bad", collateral=False):
    return FailureRecord(
        rank=rank,
        host="here",
        pid=1,
        error=error,
        message=message,
        frames=(),
        traceback="",
        time=time,
        collateral=collateral,
    )


def running(rank, **more):
    return RankState(rank=rank, pid=100 + rank, **more)


def ended(rank, code, at, **more):
    failed_at = at if code != 0 or "record" in more else None
    return RankState(rank=rank, pid=100 + rank, exit_code=code, ended_at=at, failed_at=failed_at, **more)


def raised(rank, at, **more):
    """A rank that ended by an exception at the time `at`."""
    return ended(rank, 1, at, record=record(rank, at, **more))


def job(*ranks, **more):
    return JobState(ranks=ranks, grace_period=GRACE, **more)


CLOSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:59623"


def test_a_job_that_runs_is_left_alone():
    assert decide(job(running(0), running(1)), now=10) == Wait()


def test_a_rank_that_finishes_early_is_no_failure():
    assert decide(job(running(0), ended(1, 0, at=5)), now=10) == Wait()


def test_it_is_over_when_all_have_ended():
    assert decide(job(ended(0, 0, at=5), ended(1, 0, at=6)), now=10) == Finish()


def test_a_failure_stops_the_others_at_once():
    assert decide(job(running(0), raised(1, at=10), running(2)), now=10) == Stop(ranks=(0, 2))


def test_the_stopped_have_the_grace_period_and_are_then_killed():
    state = job(running(0, sent=(signal.SIGTERM,)), raised(1, at=10), stopped_at=10)
    assert decide(state, now=10.1) == Wait(until=10 + GRACE)
    assert decide(state, now=10 + GRACE) == Kill(ranks=(0,))


def test_a_failing_rank_that_hangs_has_its_time_and_is_then_killed_too():
    state = job(running(0), running(1, record=record(1, 10), failed_at=10))
    assert decide(state, now=10) == Stop(ranks=(0,))
    state = job(
        ended(0, -signal.SIGTERM, at=10.1, sent=(signal.SIGTERM,)),
        running(1, record=record(1, 10), failed_at=10),
        stopped_at=10,
    )
    assert decide(state, now=11) == Wait(until=10 + GRACE)
    assert decide(state, now=15) == Kill(ranks=(1,))


def test_processes_left_by_the_failed_rank_are_stopped_with_the_others():
    assert decide(job(running(0), raised(1, at=10)), now=10) == Stop(ranks=(0,))
    assert decide(job(running(0), replace(raised(1, at=10), leftovers=True)), now=10) == Stop(ranks=(0, 1))


def test_processes_left_after_success_have_a_moment_then_sigterm_then_sigkill():
    state = job(ended(0, 0, at=10), ended(1, 0, at=11, leftovers=True))
    assert decide(state, now=11) == Wait(until=11 + SETTLE)
    assert decide(state, now=11 + SETTLE) == Stop(ranks=(1,))
    state = job(state.ranks[0], replace(state.ranks[1], sent=(signal.SIGTERM,)), stopped_at=12)
    assert decide(state, now=12.5) == Wait(until=11 + SETTLE + GRACE)
    assert decide(state, now=11 + SETTLE + GRACE) == Kill(ranks=(1,))


def test_leftovers_do_not_disturb_ranks_that_still_run():
    assert decide(job(running(0), ended(1, 0, at=10, leftovers=True)), now=100) == Wait()


def test_a_consequence_waits_for_its_cause_a_moment():
    state = job(running(0), raised(1, at=10, message=CLOSED))
    assert decide(state, now=10) == Wait(until=10 + SETTLE)
    assert decide(state, now=10 + SETTLE) == Stop(ranks=(0,))


def test_the_cause_ends_that_wait():
    state = job(ended(0, -signal.SIGKILL, at=10.2), raised(1, at=10, message=CLOSED), running(2))
    assert decide(state, now=10.2) == Stop(ranks=(2,))


def test_a_process_that_even_sigkill_does_not_end_is_given_up():
    state = job(running(0, sent=(15, 9), killed_at=15), raised(1, at=10), stopped_at=10)
    assert decide(state, now=16) == Wait(until=15 + GIVE_UP)
    assert decide(state, now=15 + GIVE_UP) == Finish()


# Somebody asks the job to stop.


def test_ctrl_c_is_passed_on_then_sigterm_then_sigkill_within_the_grace_period():
    asked = (Request(signal=signal.SIGINT, time=20.0),)
    assert decide(job(running(0), running(1), requests=asked), now=20) == Forward(signal=signal.SIGINT)
    state = job(running(0), running(1), requests=asked, forwarded=True)
    assert decide(state, now=20) == Wait(until=20 + GRACE / 2)
    assert decide(state, now=20 + GRACE / 2) == Stop(ranks=(0, 1))
    assert decide(state, now=20 + GRACE) == Kill(ranks=(0, 1))


def test_children_of_ranks_that_ended_on_request_are_stopped_at_once():
    asked = (Request(signal=signal.SIGTERM, time=20.0),)
    left = ended(0, -signal.SIGTERM, at=20.1, leftovers=True)
    assert decide(job(left, ended(1, 0, at=20.2), requests=asked, forwarded=True), now=20.2) == Stop(ranks=(0,))
    assert decide(job(left, running(1), requests=asked, forwarded=True), now=20.2) == Wait(until=20 + GRACE / 2)


def test_pressing_again_is_quicker():
    twice = tuple(Request(signal=signal.SIGINT, time=20.0 + i) for i in range(2))
    thrice = (*twice, Request(signal=signal.SIGINT, time=22.0))
    assert decide(job(running(0), requests=twice, forwarded=True), now=21) == Stop(ranks=(0,))
    assert decide(job(running(0, sent=(15,)), requests=thrice, forwarded=True), now=22) == Kill(ranks=(0,))


def test_two_signals_for_one_key_press_count_once():
    same = (Request(signal=signal.SIGINT, time=20.0), Request(signal=signal.SIGINT, time=20.01))
    assert decide(job(running(0), requests=same, forwarded=True), now=20.01) == Wait(until=20 + GRACE / 2)


def test_sigterm_again_is_not_quicker():
    again = tuple(Request(signal=signal.SIGTERM, time=20.0 + i) for i in range(3))
    assert decide(job(running(0), requests=again, forwarded=True), now=22) == Wait(until=20 + GRACE / 2)


def test_ctrl_c_while_a_failed_job_is_being_stopped_kills_at_once():
    state = job(
        running(0, sent=(signal.SIGTERM,)),
        raised(1, at=10),
        stopped_at=10,
        requests=(Request(signal=signal.SIGINT, time=11.0),),
    )
    assert decide(state, now=11) == Kill(ranks=(0,))
    assert interrupted_by(state) is None


def test_what_fails_after_ctrl_c_is_not_a_failure():
    asked = (Request(signal=signal.SIGINT, time=20.0),)
    state = job(ended(0, 130, at=20.1), raised(1, at=20.2, message=CLOSED), requests=asked, forwarded=True)
    assert first_failure(state) is None
    assert interrupted_by(state) == signal.SIGINT


def test_a_signal_after_the_last_rank_ended_interrupts_nothing():
    state = job(ended(0, 0, at=19), requests=(Request(signal=signal.SIGTERM, time=20.0),))
    assert interrupted_by(state) is None


# Ranks that said that they will stop in order.


def asked(*signals):
    return tuple(Request(signal=number, time=time) for number, time in signals)


TERM, ACK = signal.SIGTERM, StopNote(signal=15)


def test_a_rank_that_will_stop_in_order_has_no_grace_period():
    state = job(running(0, stop=ACK), running(1, stop=ACK), requests=asked((TERM, 20.0)), forwarded=True)
    assert decide(state, now=20 + 100 * GRACE) == Wait()


def test_one_that_said_nothing_has_it_beside_one_that_did():
    state = job(running(0, stop=ACK), running(1), requests=asked((TERM, 20.0)), forwarded=True)
    assert decide(state, now=20) == Wait(until=20 + GRACE / 2)
    assert decide(state, now=20 + GRACE / 2) == Stop(ranks=(1,))
    assert decide(state, now=20 + GRACE) == Kill(ranks=(1,))
    stuck = replace(state.ranks[1], sent=(15, 9), received=(15, 9), killed_at=20 + GRACE)
    state = replace(state, ranks=(state.ranks[0], stuck))
    assert decide(state, now=20 + GRACE + GIVE_UP) == Wait()  # one that cannot be ended does not end the other


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_starts_the_grace_period_of_those_that_stop_in_order(second):
    state = job(running(0, stop=ACK), requests=asked((TERM, 20.0), (second, 50.0)), forwarded=True)
    assert decide(state, now=50) == Stop(ranks=(0,))
    state = replace(state, ranks=(running(0, stop=ACK, sent=(15,), received=(15,)),), stopped_at=50)
    assert decide(state, now=50) == Wait(until=50 + GRACE)
    assert decide(state, now=50 + GRACE) == Kill(ranks=(0,))


def test_the_same_signal_once_more_at_once_is_no_second_one():
    state = job(running(0, stop=ACK), requests=asked((TERM, 20.0), (TERM, 20.1)), forwarded=True)
    assert decide(state, now=21) == Wait()


def test_the_same_signal_on_another_host_is_no_second_one():
    both = (Request(signal=15, time=20.0), Request(signal=15, time=25.0, machine=1))
    state = job(running(0, stop=ACK), requests=both, forwarded=True)
    assert decide(state, now=26) == Wait()
    keys = (Request(signal=2, time=20.0), Request(signal=2, time=21.0, machine=1))
    assert decide(job(running(0), requests=keys, forwarded=True), now=21) == Wait(until=20 + GRACE / 2)
    again = (*both, Request(signal=15, time=30.0, machine=1))
    assert decide(replace(state, requests=again), now=30) == Stop(ranks=(0,))


def test_sigusr1_again_changes_nothing():
    state = job(running(0, stop=ACK), requests=asked((signal.SIGUSR1, 20.0), (signal.SIGUSR1, 30.0)), forwarded=True)
    assert decide(state, now=30) == Wait()


def test_ranks_that_stopped_in_order_have_not_failed():
    said = StopNote(signal=10, rank=1, step=7, checkpoint="c")
    state = job(ended(0, 143, at=20, stop=StopNote(signal=10)), ended(1, 143, at=20, stop=said))
    assert first_failure(state) is None
    assert interrupted_by(state) == signal.SIGUSR1
    assert stop_note(state) == said
    assert {outcome(state, each) for each in state.ranks} == {Outcome.STOPPED}


def test_a_code_of_143_without_a_word_is_a_failure():
    state = job(ended(0, 143, at=20), ended(1, 143, at=20, stop=ACK))
    assert first_failure(state) == state.ranks[0]


def test_what_breaks_while_a_rank_stops_in_order_is_a_failure():
    wrong = replace(raised(1, at=21), stop=ACK)
    state = job(ended(0, 143, at=22, stop=ACK), wrong, requests=asked((TERM, 20.0)), forwarded=True)
    assert first_failure(state) == wrong
    pressed = replace(state, ranks=(state.ranks[0], replace(wrong, received=(15,))))
    assert first_failure(pressed) is None
    broken = replace(raised(1, at=21, message=CLOSED), stop=ACK)
    assert first_failure(replace(state, ranks=(state.ranks[0], broken))) is None
    killed = ended(1, -15, at=21, stop=ACK)
    assert first_failure(replace(state, ranks=(state.ranks[0], killed))) is None


# Several hosts.

HOSTS = (Machine(machine=0, host="a"), Machine(machine=1, host="b"), Machine(machine=2, host="c"))


def test_a_launcher_acts_on_its_own_ranks_only():
    ranks = (running(0), running(1), replace(raised(2, at=10), machine=1), running(3, machine=2))
    for machine, own in enumerate([(0, 1), (), (3,)]):
        action = decide(job(*ranks, machine=machine, machines=HOSTS), now=10)
        assert action == (Stop(ranks=own) if own else Wait())


def test_machine_0_waits_for_all_and_the_others_for_machine_0():
    over = tuple(replace(each, over=True) for each in HOSTS)
    gone = ended(0, 0, at=10, machine=1), ended(1, 0, at=10), ended(2, 0, at=10, machine=2)
    assert decide(job(*gone, machines=HOSTS), now=11) == Wait()
    assert decide(job(*gone, machines=(HOSTS[0], over[1], HOSTS[2])), now=11) == Wait()
    assert decide(job(*gone, machines=(HOSTS[0], over[1], over[2])), now=11) == Finish()
    assert decide(job(*gone, machines=(HOSTS[0], over[1], replace(HOSTS[2], lost_at=9))), now=11) == Finish()
    assert decide(job(*gone, machine=1, machines=(HOSTS[0], over[1], over[2])), now=11) == Wait()
    assert decide(job(*gone, machine=1, machines=(over[0], *HOSTS[1:])), now=11) == Finish()
    assert decide(job(*gone, machine=1, machines=(replace(HOSTS[0], lost_at=9), *HOSTS[1:])), now=11) == Finish()


def test_a_lost_host_stops_the_ranks_of_the_others():
    state = job(running(0), running(1, machine=1, lost_at=2, failed_at=12), machines=HOSTS)
    assert decide(state, now=12) == Stop(ranks=(0,))
    assert outcome(state, state.ranks[1]) is Outcome.FAILED_FIRST


def test_ranks_of_a_lost_host_that_had_ended_are_not_lost():
    state = job(ended(0, 0, at=1), ended(1, 0, at=1, machine=1), machines=(HOSTS[0], replace(HOSTS[1], lost_at=2)))
    assert decide(state, now=12) == Finish()
    assert first_failure(state) is None


def test_a_request_on_one_host_is_passed_on_by_all():
    request = Request(signal=15, time=20.0, machine=1)
    state = job(running(0), running(1, machine=1), machines=HOSTS, requests=(request,))
    assert decide(state, now=20) == Forward(signal=15)


# Which rank failed first.


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param([raised(0, at=11), raised(1, at=10)], 1, id="the earlier exception"),
        pytest.param([raised(0, at=10, message=CLOSED), ended(1, -9, at=12)], 1, id="a kill before a broken connection"),
        pytest.param([raised(0, at=10, collateral=True), raised(1, at=12)], 1, id="a cause before a declared consequence"),
        pytest.param(
            [raised(0, at=10, error="torch.distributed.DistBackendError", message="NCCL error"), raised(1, at=12)],
            1,
            id="a cause before a backend error",
        ),
        pytest.param(
            [raised(0, at=12, message=CLOSED), raised(1, at=11, message="Connection reset by peer")],
            1,
            id="the earlier where all are consequences",
        ),
        pytest.param([ended(0, 3, at=10), raised(1, at=12)], 0, id="an exit code without a record"),
        pytest.param([ended(0, -15, at=10.3, received=(15,)), raised(1, at=10.2)], 1, id="not one that the launcher stopped"),
        pytest.param([ended(0, 143, at=10.3, received=(15,)), raised(1, at=10.2)], 1, id="not the code of a SIGTERM handler"),
        pytest.param(
            [replace(raised(0, at=10.6), received=(15,)), raised(1, at=10.2, message=CLOSED)],
            1,
            id="not what SIGTERM made a rank raise",
        ),
        pytest.param(
            [ended(0, -11, at=10.9, received=(15,)), raised(1, at=10.2, message=CLOSED)],
            0,
            id="a crash that was seen only after SIGTERM was sent",
        ),
        pytest.param(
            [raised(0, at=10.6), ended(1, 5, at=10.2, sent=(15,))],
            1,
            id="a rank whose children were stopped after its own end",
        ),
        pytest.param([ended(0, 0, at=9), raised(1, at=10, message=CLOSED)], 0, id="a rank that left, where others broke off"),
        pytest.param(
            [raised(0, at=10, message=CLOSED), ended(1, 0, at=10.4), ended(2, 0, at=10.1)],
            2,
            id="the first that left, whose end was seen a little later than what it did to others",
        ),
        pytest.param([raised(0, at=10, message=CLOSED), ended(1, 0, at=12)], 0, id="not a rank that left long after"),
        pytest.param([ended(0, 0, at=9), raised(1, at=10)], 1, id="not a rank that finished before another failed"),
        pytest.param(
            [ended(0, 0, at=10.6, received=(15,)), raised(1, at=10, message=CLOSED)],
            1,
            id="not a rank that ended well on SIGTERM",
        ),
        pytest.param(
            [ended(0, 143, at=9.9, stop=StopNote(signal=15)), raised(1, at=10, message=CLOSED)],
            0,
            id="a rank that stopped in order, alone",
        ),
        pytest.param(
            [raised(0, at=10, message=CLOSED), running(1, machine=1, lost_at=2, failed_at=12)],
            1,
            id="a host that was lost, as soon as that is known",
        ),
    ],
)
def test_the_first_failure(ranks, expected):
    state = job(*ranks, stopped_at=10.5)
    first = first_failure(state)
    assert first is not None
    assert first.rank == expected
    assert outcome(state, first) is Outcome.FAILED_FIRST


def test_outcomes_name_what_happened_to_each_rank():
    state = job(
        raised(0, at=10),
        raised(1, at=10.1, message=CLOSED),
        raised(2, at=10.2),
        ended(3, -15, at=10.4, received=(15,)),
        ended(4, 0, at=9),
        replace(raised(5, at=11), received=(15,)),
        stopped_at=10.3,
    )
    assert [outcome(state, one) for one in state.ranks] == [
        Outcome.FAILED_FIRST,
        Outcome.CONSEQUENCE,
        Outcome.FAILED_TOO,
        Outcome.STOPPED,
        Outcome.FINISHED,
        Outcome.CONSEQUENCE,
    ]


# All of it together, on simulated ranks.


@dataclass
class SimulatedRank:
    """Ends by itself at `end` with `code`; on a signal, ends after the delay given for it, or never (None)."""

    end: float
    code: int
    on_signal: dict[int, float | None]
    hangs: bool = False
    """After its exception it does not end by itself."""
    message: str = "bad"
    state: RankState = field(init=False)

    def observe(self, rank, now):
        if not hasattr(self, "state"):
            self.state = running(rank)
        if self.state.running and now >= self.end:
            text = record(rank, self.end, message=self.message) if self.code == 1 else None
            hangs = self.hangs and text is not None
            self.state = replace(
                self.state,
                record=self.state.record or text,
                exit_code=None if hangs else self.code,
                ended_at=None if hangs else now,
                failed_at=self.state.failed_at or (now if self.code else None),
            )
        return self.state

    def signalled(self, number, now, group):
        if group:
            received = (*self.state.received, number) if self.state.running else self.state.received
            killed_at = now if number == signal.SIGKILL else self.state.killed_at
            self.state = replace(self.state, sent=(*self.state.sent, number), received=received, killed_at=killed_at)
        delay = 0.0 if number == signal.SIGKILL else self.on_signal.get(number)
        if delay is not None and self.state.running and now + delay < (float("inf") if self.hangs else self.end):
            self.end, self.code, self.hangs = now + delay, -number, False


def ranks_strategy():
    reaction = st.one_of(st.none(), st.floats(0, 8))
    return st.lists(
        st.builds(
            SimulatedRank,
            end=st.one_of(st.floats(1, 30), st.just(float("inf"))),
            code=st.sampled_from([0, 1, 3, -9, -11]),
            on_signal=st.fixed_dictionaries({signal.SIGINT: reaction, signal.SIGTERM: reaction}),
            hangs=st.booleans(),
            message=st.sampled_from(["bad", CLOSED]),
        ),
        min_size=1,
        max_size=5,
    )


@settings(max_examples=300, deadline=None)
@given(ranks=ranks_strategy(), ctrl_c=st.lists(st.floats(2, 40), max_size=3))
def test_every_job_ends_soon_after_its_first_failure_and_never_waits_in_vain(ranks, ctrl_c):
    now, state, presses = 0.0, job(), sorted(ctrl_c)
    began = None  # when there was the first reason to end
    for _ in range(200):
        seen = tuple(one.observe(rank, now) for rank, one in enumerate(ranks))
        requests = tuple(Request(signal=signal.SIGINT, time=time) for time in presses if time <= now)
        state = replace(state, ranks=seen, requests=requests)
        if began is None and (requests or any(one.failed for one in seen)):
            began = now
        action = decide(state, now)
        if isinstance(action, Finish):
            break
        if isinstance(action, Wait):
            times = [one.end for one in ranks if now < one.end < float("inf")] + [time for time in presses if time > now]
            if action.until is not None:
                assert action.until > now, "a wait that is over already would spin"
                times.append(action.until)
            if not times:
                assert began is None, "a job that should end waits for ever"
                return  # it runs on, as it should
            now = min(times)
            continue
        number = {Forward: signal.SIGINT, Stop: signal.SIGTERM, Kill: signal.SIGKILL}[type(action)]
        targets = range(len(ranks)) if isinstance(action, Forward) else action.ranks
        assert targets, "an action without a target would repeat for ever"
        for rank in targets:
            ranks[rank].signalled(number, now, group=not isinstance(action, Forward))
        state = replace(
            state,
            forwarded=state.forwarded or isinstance(action, Forward),
            stopped_at=state.stopped_at or (None if isinstance(action, Forward) else now),
        )
    else:
        pytest.fail("the job did not end")
    assert not any(one.running for one in state.ranks), "a process was left"
    assert began is None or now <= began + SETTLE + GRACE + 1e-6
    failed = [one for one in state.ranks if one.failed]
    assert not failed or first_failure(state) is not None or interrupted_by(state) is not None
