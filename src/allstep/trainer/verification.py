"""A run that `allstep verify` started: the user's script, stopped after some steps, with all that it did written down.

What is changed about it stands in the environment variable ALLSTEP_VERIFY, as JSON; the script itself is run as it is.
"""

import copy
import json
import os
from dataclasses import asdict, dataclass

from allstep.arguments import TrainingArguments
from allstep.trainer.callbacks.handler import TrainerCallback
from allstep.trainer.state import TrainerControl, TrainerState

__all__ = ["VARIABLE", "StopAfter", "Verification"]

VARIABLE = "ALLSTEP_VERIFY"
"""Name of the environment variable."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How a verified run differs from the one that the script asks for."""

    output_dir: str
    """Where it writes, in place of the script's own folder."""
    steps: int
    """It ends after this optimizer step; the schedule is that of the whole run."""
    ranks: int | None = None
    """The global batch is what the script would have on so many ranks, unless it sets global_batch_size; None: as it is."""
    micro_batches: int | None = None
    """Micro-batches of a global batch, whatever the script sets; None: as above."""
    resume_from: str | None = None
    """A checkpoint to begin from; None: from the start, whatever the script says."""

    @classmethod
    def asked_for(cls) -> "Verification | None":
        """The one that this process was started for."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))

    def to_json(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))

    def adapted(self, args: TrainingArguments) -> TrainingArguments:
        """A copy of `args` for the verified run: written down in full, and nothing evaluated or saved on the way."""
        changed = copy.copy(args)
        if self.micro_batches is not None:
            changed.global_batch_size = args.per_device_train_batch_size * self.micro_batches
        elif args.global_batch_size is None and self.ranks is not None:
            changed.global_batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * self.ranks
        if changed.global_batch_size is not None:
            changed.gradient_accumulation_steps = 1
        changed.output_dir, changed.ledger, changed.ledger_digest_steps = self.output_dir, True, 1
        changed.eval_strategy = changed.save_strategy = changed.logging_strategy = "no"
        changed.load_best_model_at_end, changed.eval_on_start = False, False
        changed.report_to, changed.disable_tqdm = [], True
        return changed


class StopAfter(TrainerCallback):
    """Ends training after a step."""

    decides_alike = True

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Stop when it has been taken."""
        if state.global_step >= self._step:
            control.should_training_stop = True
