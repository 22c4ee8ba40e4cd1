"""Names that are no argument, and what to write instead: words of other trainers, slips of the pen."""

import difflib
from collections.abc import Collection, Iterable, Mapping

__all__ = ["ELSEWHERE", "explain_unknown", "unknown_names_message"]

_SEQ2SEQ = "it is an argument of Seq2SeqTrainingArguments"

ELSEWHERE: Mapping[str, str] = {
    "amp": "write bf16=True or fp16=True",
    "batch_size": "write per_device_train_batch_size, the samples of one micro-batch on one rank",
    "epochs": "write num_train_epochs",
    "generation_config": _SEQ2SEQ,
    "generation_max_length": _SEQ2SEQ,
    "generation_num_beams": _SEQ2SEQ,
    "lr": "write learning_rate",
    "lr_scheduler": "write lr_scheduler_type",
    "optimizer": "write optim, or Trainer(optimizers=(optimizer, scheduler)) for one of your own",
    "precision": "write bf16=True or fp16=True",
    "predict_with_generate": _SEQ2SEQ,
    "sortish_sampler": _SEQ2SEQ,
}
"""Name → what to write instead. No name here is a field of TrainingArguments (tests/unit/test_arguments.py)."""


def explain_unknown(name: str, known: Collection[str], elsewhere: Mapping[str, str] = ELSEWHERE) -> str:
    """One sentence on a name that is not among `known`: what to write instead, or the nearest names."""
    if name in elsewhere:
        return f"'{name}': {elsewhere[name]}"
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.65)
    return f"'{name}': did you mean {' or '.join(close)}?" if close else f"'{name}': no argument has a name like it"


def unknown_names_message(
    owner: str, names: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str] = ELSEWHERE
) -> str:
    """The text of the TypeError for arguments that `owner` does not have, one line each."""
    lines = [f"\n  {explain_unknown(name, known, elsewhere)}" for name in names]
    return f"{owner} has no such argument{'s' if len(lines) > 1 else ''}:{''.join(lines)}"
