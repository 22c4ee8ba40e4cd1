"""Metrics that are merged over ranks: those whose states cannot be merged soundly are refused, by name."""

import pytest
import torch

from allstep.comm.communicator import SoloCommunicator
from allstep.trainer.evaluation.metric_states import MetricStates, check_metrics


def dim_zero_sum(values):
    return sum(values)


def dim_zero_mean(values):
    return sum(values) / len(values)


class Kept:
    """Counts rows, and has what tells a metric of torchmetrics."""

    def __init__(self, reduction=dim_zero_sum, full_state_update=False):
        self.rows, self._reductions = 0, {"rows": reduction}
        self.sync_on_compute, self.full_state_update = True, full_state_update

    def update(self, predictions, labels):
        self.rows += len(predictions)

    def merge_state(self, other):
        self.rows += other.rows

    def compute(self):
        return torch.tensor(float(self.rows))


class TwoRanks(SoloCommunicator):
    """What two ranks with the same state exchange."""

    size = 2

    def all_gather_object(self, value):
        return [value, value]


def computed(metric, communicator, updates=2):
    states = MetricStates({"rows": metric}, torch.device("cpu"))
    for _ in range(updates):
        states.update(torch.zeros(3), torch.zeros(3))
    return states.compute(communicator)


def test_states_are_merged_over_ranks_and_the_metric_that_was_given_is_left_as_it_was():
    metric = Kept()
    assert computed(metric, TwoRanks()) == {"rows": 12.0}
    assert computed(metric, SoloCommunicator()) == {"rows": 6.0}
    assert metric.rows == 0


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (Kept(dim_zero_mean), "'rows' cannot be merged over ranks: its state rows has no sum, maximum, minimum or list"),
        (Kept(None), "its state rows has no sum"),
        (Kept(full_state_update=True), "full_state_update is set"),
    ],
)
def test_what_cannot_be_merged_soundly_is_refused_on_several_ranks_only(metric, said):
    with pytest.raises(ValueError, match="cannot be merged over ranks") as error:
        computed(metric, TwoRanks())
    assert said in str(error.value)
    assert computed(metric, SoloCommunicator()) == {"rows": 6.0}


@pytest.mark.parametrize("given", [3, {"accuracy": 3}, {"accuracy": lambda prediction: {}}])
def test_what_is_no_metric_is_refused(given):
    with pytest.raises(TypeError, match=r"expected .*object.* with update\(predictions, labels\), merge_state\(others\)"):
        check_metrics(given)
