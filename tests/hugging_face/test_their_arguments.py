"""transformers' TrainingArguments handed to our Trainer, and what a Seq2SeqTrainer generates."""

from dataclasses import dataclass

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="its arguments are handed over")


def train_by_theirs(rank, size, folder):
    from allstep import Trainer, TrainingArguments
    from allstep.testing.models import Regression, RegressionNet

    @dataclass
    class MyArguments(transformers.TrainingArguments):
        flavour: str = "plain"

    args = MyArguments(
        folder, per_device_train_batch_size=2, max_steps=3, use_cpu=True, eval_strategy="epoch", logging_steps=1,
        lr_scheduler_type="cosine", save_strategy="no", flavour="sweet", learning_rate=0.01, gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer = Trainer(RegressionNet(), args, train_dataset=Regression(12), eval_dataset=Regression(5))
    assert isinstance(trainer.args, TrainingArguments)
    assert trainer.args.flavour == "sweet"
    assert (trainer.args.lr_scheduler_type, trainer.args.eval_strategy) == ("cosine", "epoch")
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_their_arguments_just_work(one_rank, ranks, tmp_path):
    (alone,) = one_rank.run(train_by_theirs, str(tmp_path / "one"))
    together = ranks.run(train_by_theirs, str(tmp_path / "two"))
    assert len(alone) == len(together[0]) == 3
    assert together[0] == together[1]


def generate(rank, size, folder):
    from transformers import T5Config, T5ForConditionalGeneration

    from allstep import Seq2SeqTrainer, Seq2SeqTrainingArguments

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=1, dropout_rate=0.0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(5):
        ids = torch.randint(2, 20, (6,), generator=generator)
        rows.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.cat([ids[:3], torch.tensor([1])])}
        )
    shapes = []

    def compute_metrics(prediction):
        predictions, labels = prediction
        shapes.append((predictions.shape, labels.shape))
        assert (predictions != -100).all()
        return {"mean_length": float((predictions > 1).sum(-1).mean())}

    args = Seq2SeqTrainingArguments(
        folder, predict_with_generate=True, generation_max_length=9, generation_num_beams=2, per_device_train_batch_size=2,
        per_device_eval_batch_size=2, num_train_epochs=1, save_strategy="no", eval_strategy="epoch", learning_rate=1e-2,
        sortish_sampler=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model, args, train_dataset=rows, eval_dataset={"a": rows, "b": rows[:3]}, compute_metrics=compute_metrics
    )
    assert trainer.args.train_sampling_strategy == "group_by_length"
    trainer.train()
    metrics = trainer.evaluate(max_length=5, num_beams=1)
    predicted = trainer.predict(rows, max_new_tokens=3)
    return (
        shapes,
        metrics["eval_a_loss"],
        metrics["eval_b_mean_length"],
        predicted.predictions.tolist(),
        sorted(predicted.metrics),
    )


def test_a_seq2seq_trainer_generates(one_rank, ranks, tmp_path):
    (alone,) = one_rank.run(generate, str(tmp_path / "one"))
    for shapes, loss, _, predicted, names in ranks.run(generate, str(tmp_path / "two")):
        assert shapes == alone[0]
        assert shapes == [((5, 9), (5, 9)), ((3, 9), (3, 9)), ((5, 5), (5, 5)), ((3, 5), (3, 5)), ((5, 4), (5, 4))]
        assert loss == pytest.approx(alone[1], rel=0.2)
        assert len(predicted) == 5
        assert {"test_loss", "test_mean_length", "test_runtime"} <= set(names)
