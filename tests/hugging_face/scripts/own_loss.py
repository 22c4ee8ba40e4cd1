"""A Trainer with a loss of its own: rare classes weigh more."""

import json
import os
import sys

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, set_seed
from transformers import Trainer, TrainingArguments
from words import TOPICS, load_tokenizer, load_words


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss_fct = nn.CrossEntropyLoss(weight=self.class_weights.to(logits.device))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


def main(argv=None):
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(args=argv)
    set_seed(training_args.seed)
    raw, tokenizer = load_words(), load_tokenizer()
    dataset = raw.map(
        lambda batch: tokenizer(batch["text"], padding="max_length", max_length=16, truncation=True), batched=True
    ).with_format("torch")
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64, num_labels=len(TOPICS),
        )
    )  # fmt: skip
    trainer = WeightedTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["validation"],
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        class_weights=torch.tensor([1.0, 2.0, 0.5]),
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        found = {name: metrics[f"eval_{name}"] for name in ("accuracy", "loss")}
        found["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        with open(os.path.join(training_args.output_dir, "result.json"), "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1:])
