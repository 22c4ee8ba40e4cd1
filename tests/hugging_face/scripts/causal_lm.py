"""Train a small GPT-2 from scratch, on blocks of text, as one does with run_clm."""

import json
import math
import os
import sys
from dataclasses import dataclass, field

from transformers import DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel, HfArgumentParser, set_seed
from transformers import Trainer, TrainingArguments
from words import load_tokenizer, load_words


@dataclass
class ModelArguments:
    n_layer: int = field(default=2, metadata={"help": "Layers of the model."})
    n_embd: int = field(default=32, metadata={"help": "Width of the model."})


@dataclass
class DataArguments:
    block_size: int = field(default=16, metadata={"help": "Tokens of a block."})


def main(argv=None):
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(args=argv)
    set_seed(training_args.seed)
    raw, tokenizer = load_words(), load_tokenizer()

    def tokenize(examples):
        return tokenizer(examples["text"])

    def group_texts(examples):
        joined = {key: sum(examples[key], []) for key in ("input_ids", "attention_mask")}
        total = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        blocks = {
            key: [value[at : at + data_args.block_size] for at in range(0, total, data_args.block_size)]
            for key, value in joined.items()
        }
        blocks["labels"] = [list(block) for block in blocks["input_ids"]]
        return blocks

    with training_args.main_process_first(desc="grouping texts"):
        tokenized = raw.map(tokenize, batched=True, remove_columns=raw["train"].column_names)
        lm = tokenized.map(group_texts, batched=True)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_layer=model_args.n_layer, n_embd=model_args.n_embd, n_head=2,
        bos_token_id=2, eos_token_id=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=lm["train"],
        eval_dataset=lm["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    metrics = train_result.metrics
    metrics["train_samples"] = len(lm["train"])
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    metrics["eval_samples"] = len(lm["validation"])
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        again = GPT2LMHeadModel.from_pretrained(training_args.output_dir)
        found = {"perplexity": metrics["perplexity"], "train_loss": train_result.training_loss, "layers": again.config.n_layer}
        with open(os.path.join(training_args.output_dir, "result.json"), "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1:])
