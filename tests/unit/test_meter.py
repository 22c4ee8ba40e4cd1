"""What the meter makes of steps."""

import torch

from allstep.trainer.meter import MOST_UNREAD, Meter, StepResult
from allstep.trainer.state import TrainerState


def result(step):
    return StepResult(torch.tensor(step / 7), torch.tensor(float(step % 5)), None, 0.1)


def test_sums_are_those_of_the_steps_in_order_however_often_they_are_read():
    seldom, often = Meter(None), Meter(None)
    first, second = TrainerState(), TrainerState()
    expected = [0.0, 0.0]
    for step in range(2 * MOST_UNREAD + 300):
        seldom.add(result(step), 1, first)
        often.add(result(step), 1, second)
        often.settle(second)
        expected[0] += float(result(step).loss_sum)
        expected[1] += float(result(step).weight_sum)
    seldom.settle(first)
    for state in (first, second):
        assert [state.run.loss, state.run.weight] == expected == [state.interval.loss, state.interval.weight]


def test_a_run_that_never_logs_holds_few_results():
    meter, state = Meter(None), TrainerState()
    for step in range(3 * MOST_UNREAD + 10):
        meter.add(result(step), 1, state)
    assert len(meter._unread) == 10
    assert state.run.weight > 0
