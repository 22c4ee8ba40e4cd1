"""When evaluations no longer get better."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError
from allstep.trainer.callbacks.early_stopping import EarlyStoppingCallback
from allstep.trainer.state import TrainerControl, TrainerState

ARGS = {"eval_strategy": "steps", "metric_for_best_model": "accuracy", "load_best_model_at_end": True}


def stops(callback, control, args, values):
    """After which evaluations it wishes to stop; the best value is noted behind each, as a run does."""
    state, stopped = TrainerState(), []
    for value in values:
        control.should_training_stop = False
        callback.on_evaluate(args, state, control, {"eval_accuracy": value})
        stopped.append(control.should_training_stop)
        best = state.best_metric
        if best is None or (value > best if args.greater_is_better else value < best):
            state.best_metric = value
    return stopped


@given(
    values=st.lists(st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5]), max_size=12),
    patience=st.integers(1, 3),
    threshold=st.sampled_from([0.0, 0.06]),
    greater=st.booleans(),
)
def test_it_stops_where_transformers_does(values, patience, threshold, greater):
    theirs = pytest.importorskip("transformers.trainer_callback", reason="the package transformers is not installed")
    args = TrainingArguments(**ARGS, greater_is_better=greater)
    own = stops(EarlyStoppingCallback(patience, threshold), TrainerControl(), args, values)
    assert own == stops(theirs.EarlyStoppingCallback(patience, threshold), theirs.TrainerControl(), args, values)


def test_an_evaluation_without_the_metric_says_nothing():
    callback, control = EarlyStoppingCallback(1), TrainerControl()
    callback.on_evaluate(TrainingArguments(**ARGS), TrainerState(best_metric=1.0), control, {"eval_other_accuracy": 0.0})
    assert not control.should_training_stop
    assert callback.early_stopping_patience_counter == 0


def test_what_it_needs_is_told_before_the_first_step():
    begin = EarlyStoppingCallback().on_train_begin
    with pytest.raises(ArgumentsError, match=r'metric_for_best_model, such as "loss" and eval_strategy="steps" or "epoch"'):
        begin(TrainingArguments(), TrainerState(), TrainerControl())
    with pytest.warns(UserWarning, match="load_best_model_at_end=True"):
        begin(TrainingArguments(**ARGS | {"load_best_model_at_end": False}), TrainerState(), TrainerControl())
    begin(TrainingArguments(**ARGS), TrainerState(), TrainerControl())
