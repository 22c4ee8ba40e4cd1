"""Who hears of an event."""

from types import SimpleNamespace

import pytest

from allstep.arguments import TrainingArguments
from allstep.trainer.callbacks import EVENTS, CallbackHandler, TrainerCallback
from allstep.trainer.state import TrainerControl


def handler(*callbacks):
    return CallbackHandler(callbacks, TrainingArguments())


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
    calls.kwargs = {"model": 1}
    calls.call(event, logs=2)
    assert [name for name, *_ in heard] == ["overridden", "replaced", "no subclass"]
    for _, args, kwargs in heard:
        assert args == (calls.args, calls.state, calls.control)
        assert kwargs == {"model": 1, "logs": 2}


def test_a_method_that_is_replaced_later_is_heard():
    heard = []
    callback = TrainerCallback()
    calls = handler(callback)
    calls.call("on_log")
    callback.on_log = lambda *_, **__: heard.append(1)
    calls.call("on_log")
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
