"""The default flow decides as Hugging Face's does, whatever is asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.arguments import TrainingArguments
from allstep.trainer.callbacks.flow import DefaultFlowCallback
from allstep.trainer.state import TrainerControl, TrainerState

theirs = pytest.importorskip("transformers.trainer_callback", reason="the package transformers is not installed")

strategies = st.sampled_from(["no", "steps", "epoch"])


@given(data=st.data())
def test_flags_after_each_step_and_epoch_are_transformers(data):
    draw = data.draw
    args = TrainingArguments(
        logging_strategy=draw(strategies),
        logging_first_step=draw(st.booleans()),
        eval_strategy=draw(strategies),
        eval_delay=draw(st.sampled_from([0, 1, 1.5, 4, 7])),
    )
    args.save_strategy = draw(st.sampled_from(["no", "steps", "epoch", "best"]))  # "best" without evaluations is refused
    every = st.integers(1, 5)
    total = draw(st.integers(1, 12))
    steps = {"logging_steps": draw(every), "eval_steps": draw(every), "save_steps": draw(st.integers(0, 5)), "max_steps": total}
    for step in range(1, total + 2):
        state = {"global_step": step, "epoch": step / 3, **steps}
        for event in ("on_step_end", "on_epoch_end"):
            own, reference = TrainerControl(), theirs.TrainerControl()
            getattr(DefaultFlowCallback(), event)(args, TrainerState(**state), own)
            getattr(theirs.DefaultFlowCallback(), event)(args, theirs.TrainerState(**state), reference)
            assert vars(own) == vars(reference), (event, state)
