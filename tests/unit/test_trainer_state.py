"""What a run knows of itself survives JSON bit for bit, and states that others wrote can be read."""

import dataclasses
import json
import math

from hypothesis import given
from hypothesis import strategies as st

from allstep.data.position import DataPosition
from allstep.trainer.state import LossSums, TrainerControl, TrainerState

floats = st.floats(allow_nan=False, allow_infinity=False)
states = st.builds(
    TrainerState,
    epoch=floats,
    global_step=st.integers(0, 2**40),
    log_history=st.lists(st.dictionaries(st.text(max_size=5), floats, max_size=3), max_size=3),
    best_metric=st.none() | floats,
    best_model_checkpoint=st.none() | st.text(max_size=20),
    position=st.none() | st.builds(DataPosition, epoch=st.integers(0, 100), step=st.integers(0, 10**6)),
    interval=st.builds(LossSums, loss=floats, weight=floats),
    run=st.builds(LossSums, loss=floats, weight=floats),
)


@given(state=states)
def test_a_state_survives_json_bit_for_bit(state):
    assert TrainerState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_a_loss_that_is_not_finite_survives_too():
    state = TrainerState(interval=LossSums(math.inf, 1.0), run=LossSums(math.nan, 2.0))
    again = TrainerState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert again.interval.loss == math.inf
    assert math.isnan(again.run.loss)


def test_a_state_that_hugging_face_wrote_is_read_and_its_other_keys_passed_over():
    saved = {
        "best_metric": None,
        "epoch": 1.5,
        "global_step": 30,
        "is_hyper_param_search": False,
        "log_history": [{"loss": 2.0, "step": 10}],
        "max_steps": 60,
        "stateful_callbacks": {"TrainerControl": {}},
        "total_flos": 0.0,
        "trial_name": None,
    }
    state = TrainerState.from_dict(saved)
    assert (state.epoch, state.global_step, state.max_steps) == (1.5, 30, 60)
    assert state.log_history == saved["log_history"]
    assert state.position is None
    assert state.interval == state.run == LossSums()


def test_a_copy_shares_nothing_with_the_state():
    state = TrainerState()
    saved = state.to_dict()
    state.log_history.append({"loss": 1.0})
    state.run.add(3.0, 2.0)
    assert saved["log_history"] == []
    assert saved["run"] == {"loss": 0.0, "weight": 0.0}


def test_a_mean_is_weighted_and_unknown_before_anything_came():
    sums = LossSums()
    assert math.isnan(sums.mean)
    sums.add(6.0, 2.0)
    sums.add(1.0, 1.0)
    assert sums.mean == 7 / 3
    sums.add(math.nan, 0.0)
    assert math.isnan(sums.mean)
    sums.clear()
    assert sums == LossSums()


def test_a_window_in_which_nothing_counts_leaves_the_mean_alone():
    sums = LossSums()
    sums.add(6.0, 2.0)
    sums.add(0.0, 0.0)
    assert sums.mean == 3.0


def test_nothing_is_wished_for_at_first():
    assert not any(dataclasses.asdict(TrainerControl()).values())
