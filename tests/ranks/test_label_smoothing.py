"""Label smoothing: a step is the smoothed mean over all its label tokens, on any number of ranks."""

import pytest
from torch import nn

from allstep import Trainer, TrainingArguments
from allstep.comm.agreement import digest
from allstep.testing.models import Tagger, Tokens, pad
from allstep.testing.ranks import one_thread


def trained(rank, size, folder):
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4 // size,
        num_train_epochs=1,
        label_smoothing_factor=0.2,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(Tagger(), args, train_dataset=Tokens(16), eval_dataset=Tokens(16), data_collator=pad)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return digest(trainer.model.named_parameters()), losses, before


def test_a_step_is_the_smoothed_mean_over_all_its_tokens(ranks, tmp_path):
    with one_thread():
        alone = trained(0, 1, tmp_path / "one")
    assert ranks.run(trained, tmp_path / "two") == [alone, alone]
    batch = pad([Tokens(16)[index] for index in range(16)])
    logits = Tagger()(batch["tokens"])["logits"]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.2).item()
    assert alone[1] == [pytest.approx(expected, rel=1e-5)]
    assert alone[2] == pytest.approx(expected, rel=1e-5)  # evaluation is smoothed too, as in transformers
