"""Who holds up the others, from what each rank has spent its time with; no process and no clock."""

import pytest

from allstep.comm.watchdog.pace import Pace, held_up

START = [Pace(0, 0.0, {}), Pace(0, 0.0, {}), Pace(0, 0.0, {})]


def after(steps: int, *ranks: tuple[float, float, float]) -> list[Pace]:
    """Of each rank, seconds of a step in data, work of backward, and waiting."""
    return [Pace(steps, steps * wait, {"data": steps * data, "backward": steps * (work + wait)}) for data, work, wait in ranks]


def test_a_rank_with_slow_data_holds_up_the_others_and_the_phase_is_named():
    judged = held_up(START, after(20, (0.01, 0.05, 0.2), (0.21, 0.05, 0.0), (0.01, 0.05, 0.2)))
    assert judged is not None
    ranks, sentence = judged
    assert ranks == (1,)
    assert sentence == (
        "Rank 1 holds up the others, who wait 0.20 s of each 0.26 s step: data takes 0.21 s a step there, 10.0 ms elsewhere."
    )


def test_a_rank_that_computes_slowly_is_named_by_its_backward():
    judged = held_up(START, after(20, (0.0, 0.3, 0.0), (0.0, 0.1, 0.2), (0.0, 0.1, 0.2)))
    assert judged is not None
    assert judged[0] == (0,)
    assert "backward takes 0.30 s a step there, 0.10 s elsewhere" in judged[1]


@pytest.mark.parametrize(
    "ranks",
    [
        [(0.01, 0.25, 0.0)] * 3,  # nobody waits
        [(0.01, 0.1, 0.1)] * 3,  # all wait alike
        [(0.2, 0.1, 0.0), (0.0, 0.1, 0.2), (0.1, 0.1, 0.05)],  # one is neither
    ],
)
def test_otherwise_nobody_is_named(ranks):
    assert held_up(START, after(20, *ranks)) == ((), "")


@pytest.mark.parametrize(("steps", "seconds"), [(5, 1.0), (50, 0.01)])
def test_a_short_time_says_nothing(steps, seconds):
    assert held_up(START, after(steps, (seconds, 0, 0), (0, 0, seconds), (0, 0, seconds))) is None


def test_of_two_looks_in_the_same_step_nothing_is_said():
    assert held_up(START, START) is None
