"""Fine-tune a BERT with a classification head; evaluate after each epoch, keep the best, predict at the end."""

import argparse
import json
import os
import sys

import numpy as np
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, set_seed
from transformers import Trainer, TrainingArguments
from words import TOPICS, load_tokenizer, load_words


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    predictions = np.argmax(logits, axis=-1)
    return {"accuracy": float((predictions == labels).mean())}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    cli = parser.parse_args(argv)
    set_seed(7)
    raw, tokenizer = load_words(), load_tokenizer()
    dataset = raw.map(lambda batch: tokenizer(batch["text"], truncation=True), batched=True)
    names = sorted(TOPICS)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=len(names), id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)},
        )
    )  # fmt: skip

    args = TrainingArguments(
        cli.output_dir,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        learning_rate=5e-3,
        per_device_train_batch_size=6,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=cli.gradient_accumulation_steps,
        num_train_epochs=10,
        weight_decay=0.01,
        warmup_steps=0.1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        save_total_limit=2,
        push_to_hub=False,
        report_to="none",
        seed=7,
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
        compute_metrics=compute_metrics,
    )
    before = trainer.evaluate()
    trainer.train()
    metrics = trainer.evaluate()
    predictions = trainer.predict(dataset["validation"])
    if trainer.is_world_process_zero():
        found = {
            "before": before["eval_loss"],
            "accuracy": metrics["eval_accuracy"],
            "eval_loss": metrics["eval_loss"],
            "best": trainer.state.best_metric,
            "predicted": np.argmax(predictions.predictions, axis=-1).tolist(),
            "labels": predictions.label_ids.tolist(),
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "checkpoints": sorted(name for name in os.listdir(cli.output_dir) if name.startswith("checkpoint-")),
            "test": sorted(predictions.metrics),
        }
        with open(os.path.join(cli.output_dir, "result.json"), "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1:])
