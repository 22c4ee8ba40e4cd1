"""What a run knows of itself survives JSON bit for bit, and states that others wrote can be read."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.data.position import DataPosition
from allstep.trainer.callbacks.early_stopping import EarlyStoppingCallback
from allstep.trainer.state import ExportableState, LossSums, TrainerControl, TrainerState

floats = st.floats(allow_nan=False, allow_infinity=False)
states = st.builds(
    TrainerState,
    epoch=floats,
    global_step=st.integers(0, 2**40),
    log_history=st.lists(st.dictionaries(st.text(max_size=5), floats, max_size=3), max_size=3),
    best_metric=st.none() | floats,
    num_input_tokens_seen=st.integers(0, 2**60),
    total_flos=floats,
    stateful_callbacks=st.just({"Some": {"args": {"x": 1}, "attributes": {}}}),
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
    assert state.stateful_callbacks == {"TrainerControl": {}}
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
    assert saved["stateful_callbacks"]["allstep"]["attributes"]["run"] == {"loss": 0.0, "weight": 0.0}
    assert state.stateful_callbacks == {}


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


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("transformers.trainer_callback", reason="the package transformers is not installed")


def test_a_state_has_transformers_fields_and_defaults(theirs):
    own, other = TrainerState().to_dict(), dataclasses.asdict(theirs.TrainerState())
    extra = own.pop("stateful_callbacks")
    assert own == {name: value for name, value in other.items() if name != "stateful_callbacks"}
    assert set(extra["allstep"]["attributes"]) == {each.name for each in dataclasses.fields(TrainerState)} - other.keys()


def test_transformers_loads_a_state_of_ours_and_the_other_way_round(theirs, tmp_path):
    state = TrainerState(
        epoch=1.5,
        global_step=30,
        log_history=[{"loss": 0.1 + 0.2, "step": 30}],
        skipped_steps=2,
        position=DataPosition(epoch=1, step=5),
        total_flos=1.5e20,
        stateful_callbacks=[EarlyStoppingCallback(3), TrainerControl(should_save=True)],
    )
    state.save_to_json(tmp_path / "trainer_state.json")
    loaded = theirs.TrainerState.load_from_json(tmp_path / "trainer_state.json")
    assert (loaded.epoch, loaded.global_step, loaded.total_flos) == (1.5, 30, 1.5e20)
    assert loaded.log_history == state.log_history
    assert (
        theirs.EarlyStoppingCallback.from_state(loaded.stateful_callbacks["EarlyStoppingCallback"]).early_stopping_patience == 3
    )
    loaded.save_to_json(tmp_path / "again.json")
    assert TrainerState.load_from_json(tmp_path / "again.json") == state
    theirs.TrainerState(global_step=7, best_metric=0.5).save_to_json(tmp_path / "theirs.json")
    assert TrainerState.load_from_json(tmp_path / "theirs.json") == TrainerState(global_step=7, best_metric=0.5)


def test_a_control_tells_its_state_as_transformers_does(theirs):
    flags = {"should_save": True, "should_epoch_stop": True}
    assert TrainerControl(**flags).state() == theirs.TrainerControl(**flags).state()
    for name in ("_new_training", "_new_epoch", "_new_step"):
        own, other = TrainerControl(*5 * [True]), theirs.TrainerControl(*5 * [True])
        getattr(own, name)(), getattr(other, name)()
        assert vars(own) == vars(other)


def test_an_exportable_state_without_one_says_so():
    with pytest.raises(NotImplementedError, match="ExportableState without a method `state`"):
        TrainerState(stateful_callbacks=[ExportableState()])
