"""NEFTune: the noise belongs to the micro-batch, so any number of ranks trains to the same bits; evaluation has none."""

import pytest

from allstep import Trainer, TrainingArguments
from allstep.comm.agreement import digest
from allstep.testing import faults
from allstep.testing.models import Tagger, Tokens, pad
from allstep.testing.ranks import one_thread


class Noisy(Tagger):
    def get_input_embeddings(self):
        return self.embed


def trained(rank, size, folder, alpha, fails=False):
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4 // size,
        max_steps=4,
        neftune_noise_alpha=alpha,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [faults.fail(StopIteration(), rank=rank, step=2)] if fails else []
    trainer = Trainer(Noisy(), args, train_dataset=Tokens(40), eval_dataset=Tokens(16), data_collator=pad, callbacks=callbacks)
    if fails:
        with pytest.raises(StopIteration):
            trainer.train()
    else:
        trainer.train()
    hooks = len(trainer.model.embed._forward_hooks)
    return digest(trainer.model.named_parameters()), hooks, trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]


def test_noise_is_the_same_on_any_number_of_ranks_and_gone_afterwards(ranks, tmp_path):
    with one_thread():
        alone = trained(0, 1, tmp_path / "one", 5.0)
    assert ranks.run(trained, tmp_path / "two", 5.0) == [alone, alone]
    assert alone[1:] == (0, True)
    assert trained(0, 1, tmp_path / "none", None)[0] != alone[0]
    assert trained(0, 1, tmp_path / "failed", 5.0, True)[1] == 0
