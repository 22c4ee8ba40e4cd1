"""Tag each word: labels of sub-words that do not count are -100, metrics are over those that do."""

import json
import os
import sys

import numpy as np
from transformers import BertConfig, BertForTokenClassification, DataCollatorForTokenClassification, HfArgumentParser, set_seed
from transformers import Trainer, TrainingArguments
from words import TAGS, load_tokenizer, load_words


def tokenize_and_align(tokenizer, examples):
    tokenized = tokenizer(examples["tokens"], truncation=True, is_split_into_words=True)
    tokenized["labels"] = []
    for index, tags in enumerate(examples["ner_tags"]):
        words = tokenized.word_ids(batch_index=index)
        tokenized["labels"].append([-100 if word is None else tags[word] for word in words])
    return tokenized


def compute_metrics(p):
    predictions, labels = p
    predictions = np.argmax(predictions, axis=2)
    counted = labels != -100
    return {"accuracy": float((predictions == labels)[counted].mean()), "tokens": int(counted.sum())}


def main(argv=None):
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(args=argv)
    set_seed(training_args.seed)
    raw, tokenizer = load_words(), load_tokenizer()
    dataset = raw.map(
        lambda examples: tokenize_and_align(tokenizer, examples), batched=True, remove_columns=raw["train"].column_names
    )
    model = BertForTokenClassification(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64, num_labels=len(TAGS),
        )
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"] if training_args.do_train else None,
        eval_dataset=dataset["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=compute_metrics,
    )
    if training_args.do_train:
        result = trainer.train()
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    metrics = trainer.evaluate()
    predictions, labels, _ = trainer.predict(dataset["validation"], metric_key_prefix="predict")
    tags = [
        [TAGS[tag] for tag, label in zip(row, row_labels, strict=True) if label != -100]
        for row, row_labels in zip(np.argmax(predictions, axis=2), labels, strict=True)
    ]
    if trainer.is_world_process_zero():
        found = {name: metrics[f"eval_{name}"] for name in ("accuracy", "tokens", "loss")} | {"tags": tags}
        with open(os.path.join(training_args.output_dir, "result.json"), "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1:])
