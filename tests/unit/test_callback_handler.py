"""Who hears of an event, with what, and who takes whose place."""

from types import SimpleNamespace

import pytest

from allstep.arguments import TrainingArguments
from allstep.trainer.callbacks.early_stopping import EarlyStoppingCallback
from allstep.trainer.callbacks.flow import DefaultFlowCallback, PrinterCallback, ProgressCallback, with_defaults
from allstep.trainer.callbacks.handler import EVENTS, CallbackHandler, TrainerCallback, heard_by
from allstep.trainer.state import ExportableState, TrainerControl

MORE = {"on_log": {"logs": {}}, "on_evaluate": {"metrics": {}}, "on_predict": {"metrics": {}}}
"""What some events come with."""


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("transformers.trainer_callback", reason="the package transformers is not installed")


def handler(*callbacks):
    return CallbackHandler(callbacks, args=TrainingArguments())


def names(calls):
    return calls.callback_list.splitlines()


@pytest.mark.parametrize("event", EVENTS)
def test_every_kind_of_callback_hears_in_order(event):
    class Overriding(TrainerCallback):
        pass

    def note(name):
        return lambda *args, **kwargs: heard.append((name, args[-3:], kwargs))

    heard = []
    setattr(Overriding, event, note("overridden"))
    replaced = TrainerCallback()
    setattr(replaced, event, note("replaced"))
    calls = handler(Overriding, TrainerCallback, replaced, SimpleNamespace(**{event: note("no subclass")}), SimpleNamespace())
    parts = ["model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"]
    for part in parts:
        setattr(calls, part, f"the {part}")
    calls.call(event, extra=2, **MORE.get(event, {}))
    assert [name for name, *_ in heard] == ["overridden", "replaced", "no subclass"]
    for _, args, kwargs in heard:
        assert args == (calls.args, calls.state, calls.control)
        expected = {part: f"the {part}" for part in parts} | {"tokenizer": "the processing_class", "extra": 2}
        assert kwargs == expected | MORE.get(event, {})


def test_a_method_that_is_replaced_later_is_heard():
    heard = []
    callback = TrainerCallback()
    calls = handler(callback)
    calls.call("on_log", logs={})
    callback.on_log = lambda *_, **__: heard.append(1)
    calls.call("on_log", logs={})
    assert heard == [1]


def test_an_event_of_ones_own_is_heard():
    heard = []
    handler(SimpleNamespace(on_moon=lambda *_, **__: heard.append(1))).call("on_moon")
    assert heard == [1]


def test_a_control_that_is_returned_replaces_the_one_passed_in():
    class Returning(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return TrainerControl(should_log=True)

    calls = handler(Returning, TrainerCallback)
    calls.call("on_step_end")
    assert calls.control.should_log


def test_what_a_callback_changes_in_logs_is_what_the_next_one_gets():
    class Renames(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logs["perplexity"] = 2 ** logs.pop("loss")

    seen = []
    logs = {"loss": 3.0}
    handler(Renames, SimpleNamespace(on_log=lambda *_, logs, **__: seen.append(dict(logs)))).call("on_log", logs=logs)
    assert seen == [logs] == [{"perplexity": 8.0}]


def test_there_are_transformers_events_in_its_order(theirs):
    assert [name for name in vars(theirs.TrainerCallback) if name.startswith("on_")] == list(EVENTS)


@pytest.mark.parametrize("event", EVENTS)
def test_flags_are_cleared_where_transformers_clears_them(event, theirs):
    flags = dict.fromkeys(vars(TrainerControl()), True)
    own, other = TrainerControl(**flags), theirs.TrainerControl(**flags)
    assert getattr(handler(), event)(None, None, own, **MORE.get(event, {})) is own
    reference = theirs.CallbackHandler([theirs.DefaultFlowCallback], *4 * [None])
    reference.callbacks = []
    getattr(reference, event)(None, None, other, **MORE.get(event, {}))
    assert vars(own) == vars(other)


def test_a_method_that_transformers_left_empty_hears_nothing(theirs):
    class Saves(theirs.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            pass

    assert [event for event in EVENTS if heard_by(Saves(), event)] == ["on_save"]


def test_a_callback_is_taken_out_by_itself_or_by_its_class():
    one, two = EarlyStoppingCallback(1), EarlyStoppingCallback(2)
    calls = handler(TrainerCallback, one, two)
    assert calls.pop_callback(two) is two
    assert calls.pop_callback(EarlyStoppingCallback) is one
    assert calls.pop_callback(EarlyStoppingCallback) is None
    calls.remove_callback(TrainerCallback)
    calls.remove_callback(TrainerCallback)
    assert calls.callbacks == []


@pytest.mark.parametrize("role", ["DefaultFlowCallback", "ProgressCallback", "PrinterCallback"])
def test_transformers_class_names_ours_and_takes_its_place(role, theirs):
    ours = {each.__name__: each for each in (DefaultFlowCallback, ProgressCallback, PrinterCallback)}[role]
    other = getattr(theirs, role)
    calls = handler(ours)
    assert type(calls.pop_callback(other)) is ours
    calls.add_callback(ours)
    calls.add_callback(other)
    calls.add_callback(ours)
    assert [type(each) for each in calls.callbacks] == [other]
    assert not calls.has_role(role), "what is shown is theirs to show"


def test_every_run_has_a_flow_and_something_that_shows_it():
    assert with_defaults(None, None) == [DefaultFlowCallback, ProgressCallback]
    own = TrainerCallback()
    assert with_defaults([own, EarlyStoppingCallback], True) == [
        DefaultFlowCallback,
        own,
        EarlyStoppingCallback,
        PrinterCallback,
    ]
    assert with_defaults([PrinterCallback], None) == [DefaultFlowCallback, PrinterCallback, ProgressCallback]


def test_what_a_user_brings_is_not_there_twice(theirs):
    class Flow(theirs.DefaultFlowCallback):
        pass

    given = [theirs.ProgressCallback(), Flow]
    assert with_defaults(given, None) == given


class Counts(TrainerCallback, ExportableState):
    def __init__(self, limit=1):
        self.limit, self.count = limit, 0

    def state(self):
        return {"args": {"limit": self.limit}, "attributes": {"count": self.count}}


def test_the_state_of_callbacks_comes_back():
    calls = handler(Counts(5), Counts(6), EarlyStoppingCallback(3), TrainerCallback)
    calls.callbacks[0].count, calls.callbacks[1].count = 7, 8
    saved = calls.export()
    assert [each["args"]["limit"] for each in saved["Counts"]] == [5, 6]
    again = handler(Counts, EarlyStoppingCallback, Counts)
    again.restore(saved)
    assert [(each.limit, each.count) for each in again.callbacks if isinstance(each, Counts)] == [(5, 7), (6, 8)]
    assert again.callbacks[1].early_stopping_patience == 3
    assert names(again) == ["Counts", "EarlyStoppingCallback", "Counts"]


def test_a_state_without_a_callback_is_told():
    with pytest.warns(UserWarning, match="does not have: Counts"):
        handler().restore(handler(Counts).export())


def test_transformers_early_stopping_is_saved_and_comes_back(theirs):
    calls = handler(theirs.EarlyStoppingCallback(4))
    calls.callbacks[0].early_stopping_patience_counter = 2
    again = handler(theirs.EarlyStoppingCallback())
    again.restore(calls.export())
    assert (again.callbacks[0].early_stopping_patience, again.callbacks[0].early_stopping_patience_counter) == (4, 2)
