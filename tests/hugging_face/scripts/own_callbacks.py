"""Callbacks of one's own, and those that transformers brings."""

import json
import os
import sys

from transformers import BertConfig, BertForSequenceClassification, EarlyStoppingCallback, HfArgumentParser, set_seed
from transformers import TrainerCallback
from transformers import Trainer, TrainingArguments
from words import TOPICS, load_tokenizer, load_words


class HistoryCallback(TrainerCallback):
    """Counts events, adds a number to what is logged, and keeps what it saw."""

    def __init__(self):
        self.events, self.losses = {}, []

    def _count(self, name):
        self.events[name] = self.events.get(name, 0) + 1

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._count("train_begin")
        self.parameters = sum(p.numel() for p in model.parameters())

    def on_step_end(self, args, state, control, **kwargs):
        self._count("step_end")
        if state.global_step == 5:
            control.should_evaluate = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        self._count("log")
        if state.is_local_process_zero and logs is not None:
            _ = logs.pop("total_flos", None)
            logs["parameters"] = self.parameters
        if "loss" in (logs or {}):
            self.losses.append(logs["loss"])

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self._count("evaluate")
        metrics["eval_seen"] = self.events["evaluate"]

    def on_epoch_end(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        self._count("epoch_end")
        assert optimizer is not None
        assert lr_scheduler is not None

    def on_save(self, args, state, control, **kwargs):
        self._count("save")
        assert os.path.isdir(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))


def main(argv=None):
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(args=argv)
    set_seed(training_args.seed)
    raw, tokenizer = load_words(), load_tokenizer()
    dataset = raw.map(lambda batch: tokenizer(batch["text"], truncation=True), batched=True)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64, num_labels=len(TOPICS),
        )
    )  # fmt: skip
    history = HistoryCallback()
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["validation"],
        processing_class=tokenizer,
        callbacks=[history, EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.3)],
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        found = {
            "events": history.events,
            "losses": history.losses,
            "steps": trainer.state.global_step,
            "seen": metrics["eval_seen"],
            "eval_losses": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        }
        with open(os.path.join(training_args.output_dir, "result.json"), "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1:])
