"""Models of Hugging Face, whose stock losses are means of many kinds, train on and log the mean over the global batch.

The reference is one forward over all rows of a step, and a mean over what counts in them, written by hand: label tokens that
are not -100, from the second of a row on for decoders, or rows. transformers' own Trainer is not held against it: with 4
micro-batches of 2 rows, one rank and a learning rate of 0, it logged for the first step

    classes (BERT)         4.387    where the mean over the rows is 1.097, with gradients 4 times too large
    a number (BERT)        0.837    0.209, the same
    tags (BERT)            6.491    1.630: 4 times the mean of the micro-batches' means
    masked tokens (BERT)  10.944    3.649: the same
    translations (T5)     16.701    4.154: the same
    GPT-2                  3.493    3.692: divided by a count that has each row's first token in it; gradients 5 % too small
    Llama                  3.726    3.726

and its eval_loss in batches of 3 was 1.6366 for the tags and 4.2951 for the translations (1.6333 and 4.2768 over all tokens).
"""

import copy

import pytest
import torch
from torch.nn import functional

transformers = pytest.importorskip("transformers", reason="its models are trained")

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ROWS = 13
"""Steps of 8 rows: the last one is ragged."""


# ---- models, made where they are used


def bert(head, **more):
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=32, **SMALL, **STILL, **more)
    return getattr(transformers, f"BertFor{head}")(config)


def gpt2(**more):
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ids = {"bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2, **still, **ids, **more)
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, max_position_embeddings=32, **SMALL))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=40, **sizes, **ids))


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **SMALL, **STILL)
    )


class Pixels(torch.nn.Module):
    """Says something of each pixel; 255 is left out, as the models for that are configured."""

    def __init__(self):
        super().__init__()
        self.config, self.layer = transformers.SegformerConfig(), torch.nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, pixel_values, labels=None):
        logits, ignored = self.layer(pixel_values), self.config.semantic_loss_ignore_index
        return {"loss": functional.cross_entropy(logits, labels, ignore_index=ignored), "logits": logits}


class Counting(torch.nn.Module):
    """A model that divides by the count that it is given, as newer ones do."""

    def __init__(self, as_tuple=False):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(40, 8), torch.nn.Linear(8, 40)
        self.as_tuple = as_tuple

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        logits = self.head(self.embed(input_ids))
        summed = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = summed / num_items_in_batch
        return (loss, logits) if self.as_tuple else transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits)


def lora(model, targets, task, **more):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=targets, task_type=task, init_lora_weights=False, **more)
    return peft.get_peft_model(model, config)


def prompts(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


# ---- rows


def words(index, length=None):
    generator = torch.Generator().manual_seed(index)
    length = length or int(torch.randint(3, 11, (), generator=generator))
    return torch.randint(5, 40, (length,), generator=generator), generator


def text(index, **labels):
    ids, _ = words(index)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **labels}


def of_a_class(index):
    return text(index, labels=torch.tensor(index % 3))


def of_a_number(index):
    return text(index, labels=torch.tensor(index / 9))


def tagged(index):
    ids, generator = words(index)
    hidden = torch.rand(len(ids), generator=generator) < (0.2, 0.9)[index % 2]
    return text(index, labels=torch.where(hidden, -100, ids % 5))


def answered(index):
    row = text(index)
    ids, _ = words(index)
    hidden = torch.arange(len(ids)) < index % 4  # a prompt
    return {**row, "labels": torch.where(hidden, -100, ids)}


def translated(index):
    return text(index, labels=words(100 + index)[0])


def paired(index):
    _, generator = words(index, 6)
    options = torch.randint(5, 40, (3, 6), generator=generator)
    return {"input_ids": options, "attention_mask": torch.ones_like(options), "labels": torch.tensor(index % 3)}


def pictured(index):
    return {"pixel_values": torch.randn(3, 8, 8, generator=words(index)[1]), "labels": torch.tensor(index % 3)}


def coloured(index):
    generator = words(index)[1]
    left_out = torch.rand(8, 8, generator=generator) < (0.1, 0.8)[index % 2]
    colours = torch.randint(3, (8, 8), generator=generator)
    return {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": torch.where(left_out, 255, colours)}


def several(index):
    return text(index, labels=torch.rand(4, generator=words(index)[1]).round())


def spanned(index):
    """Of one length: what this head says of a row depends on how far it is padded."""
    ids, _ = words(index, 8)
    return {"input_ids": ids, "start_positions": torch.tensor(index % 7), "end_positions": torch.tensor(7)}


def only_ids(index):
    row = tagged(index)
    return {"input_ids": row["input_ids"], "labels": row["labels"]}


def padded(samples):
    """Rows of unequal length to a batch, and batches of unequal width to a greater one."""
    return {
        key: torch.nn.utils.rnn.pad_sequence(
            [sample[key] for sample in samples], batch_first=True, padding_value=-100 if key == "labels" else 0
        )
        if samples[0][key].dim() == 1 and len({sample[key].shape for sample in samples}) > 1
        else torch.stack([sample[key] for sample in samples])
        for key in samples[0]
    }


def masked(samples):
    """As `DataCollatorForLanguageModeling` masks: few tokens, and in some rows none."""
    batch = padded(samples)
    chosen = (torch.rand(batch["input_ids"].shape) < 0.2) & (batch["attention_mask"] == 1)
    return {
        "input_ids": batch["input_ids"].masked_fill(chosen, 4),
        "attention_mask": batch["attention_mask"],
        "labels": batch["input_ids"].masked_fill(~chosen, -100),
    }


# ---- means by hand


def of_tokens(logits, batch):
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def of_next_tokens(logits, batch):
    logits = logits[:, -batch["labels"].shape[1] :]  # virtual tokens come first
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def of_tokens_behind_prompts(logits, batch):
    logits = logits[:, -batch["labels"].shape[1] - 1 : -1]  # the last virtual token says the first one
    return of_tokens(logits, batch)


def of_rows(logits, batch):
    return functional.cross_entropy(logits, batch["labels"])


def of_pixels(logits, batch):
    return functional.cross_entropy(logits, batch["labels"], ignore_index=255)


def squared(logits, batch):
    return (logits.squeeze(1) - batch["labels"]).square().mean()


def binary(logits, batch):
    return functional.binary_cross_entropy_with_logits(logits, batch["labels"])


def of_spans(logits, batch):
    start, end = logits
    losses = functional.cross_entropy(start, batch["start_positions"]), functional.cross_entropy(end, batch["end_positions"])
    return sum(losses) / 2


KINDS = {
    "classes": (lambda: bert("SequenceClassification", num_labels=3), of_a_class, padded, of_rows),
    "a number": (lambda: bert("SequenceClassification", num_labels=1), of_a_number, padded, squared),
    "several classes": (lambda: bert("SequenceClassification", num_labels=4), several, padded, binary),
    "tags": (lambda: bert("TokenClassification", num_labels=5), tagged, padded, of_tokens),
    "masked tokens": (lambda: bert("MaskedLM"), text, masked, of_tokens),
    "answers": (lambda: bert("QuestionAnswering"), spanned, padded, of_spans),
    "choices": (lambda: bert("MultipleChoice"), paired, padded, of_rows),
    "GPT-2": (gpt2, answered, padded, of_next_tokens),
    "Llama": (llama, answered, padded, of_next_tokens),
    "T5": (t5, translated, padded, of_tokens),
    "pictures": (vit, pictured, padded, of_rows),
    "pixels": (Pixels, coloured, padded, of_pixels),
    "a tuple": (lambda: bert("TokenClassification", num_labels=5, return_dict=False), tagged, padded, of_tokens),
    "a count": (Counting, only_ids, padded, of_tokens),
    "a count and a tuple": (lambda: Counting(as_tuple=True), only_ids, padded, of_tokens),
    "LoRA, GPT-2": (lambda: lora(gpt2(), ["c_attn"], "CAUSAL_LM", fan_in_fan_out=True), answered, padded, of_next_tokens),
    "LoRA, tags": (lambda: lora(bert("TokenClassification", num_labels=5), ["query"], "TOKEN_CLS"), tagged, padded, of_tokens),
    "prompts": (lambda: prompts(gpt2()), answered, padded, of_tokens_behind_prompts),
}  # fmt: skip


SHORT = {"classes", "tags", "masked tokens", "GPT-2", "Llama", "T5", "a count", "LoRA, tags", "prompts"}
"""Those of every run; the others are long."""


class Watch(transformers.TrainerCallback):
    """The gradients of each step, and how many batches were seen by then."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def numbers_of(rank, size, kind, folder, accumulation):
    """The largest relative difference of logged losses and gradients from the reference; eval_loss, and what it is by hand."""
    from allstep import Trainer, TrainingArguments

    def recorded(samples):
        batches.append(collator(samples))
        return batches[-1]

    make, row, collator, reference = KINDS[kind]
    batches, watch, rows = [], Watch(), [row(index) for index in range(ROWS)]
    torch.manual_seed(3)
    model = make()
    args = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, num_train_epochs=1, optim="sgd",
        learning_rate=0.0, max_grad_norm=0.0, logging_steps=1, save_strategy="no", per_device_eval_batch_size=1 + accumulation,
    )  # fmt: skip
    trainer = Trainer(model, args, data_collator=recorded, train_dataset=rows, eval_dataset=rows, callbacks=[watch])
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    windows = trainer.communicator.all_gather_object(
        [batches[at : at + accumulation] for at in range(0, len(batches), accumulation)]
    )
    differences = []
    for step, (loss, gradients) in enumerate(zip(logged, watch.gradients, strict=True)):
        samples = [
            {key: value[at] for key, value in batch.items()}
            for of_rank in windows
            for batch in of_rank[step : step + 1]
            for batch in batch
            for at in range(len(batch["labels" if "labels" in batch else "start_positions"]))
        ]
        expected, reference_gradients = by_hand(model, padded(samples), reference)
        assert gradients.keys() == reference_gradients.keys()
        differences.append(abs(loss - expected) / expected)
        largest = max(wanted.norm() for wanted in reference_gradients.values())  # some are 0 but for rounding: a key's bias
        differences += [
            float((gradients[name] - wanted).norm() / (wanted.norm() + 0.01 * largest))
            for name, wanted in reference_gradients.items()
        ]
    by_hand_of_all = None if kind == "masked tokens" else by_hand(model, padded(rows), reference)[0]
    return max(differences), trainer.evaluate()["eval_loss"], by_hand_of_all


def by_hand(model, batch, reference):
    again = copy.deepcopy(model).eval()
    again.zero_grad()
    outputs = again(**batch, **({"num_items_in_batch": 1} if isinstance(model, Counting) else {}))
    if isinstance(outputs, tuple):
        logits = outputs[1]
    else:
        logits = (outputs["start_logits"], outputs["end_logits"]) if "start_logits" in outputs else outputs["logits"]
    loss = reference(logits, batch)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in again.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [each if each in SHORT else pytest.param(each, marks=pytest.mark.long) for each in KINDS])
def test_losses_and_gradients_are_means_over_the_global_batch(one_rank, ranks, tmp_path, kind):
    for accumulation in (1, 4):
        found = [each for pool in (one_rank, ranks) for each in pool.run(numbers_of, kind, str(tmp_path), accumulation)]
        assert max(difference for difference, _, _ in found) < 1e-4  # a wrong mean is off by hundreds of that
        ((eval_loss, by_hand_of_all),) = {tuple(each) for _, *each in found}
        assert by_hand_of_all is None or eval_loss == pytest.approx(by_hand_of_all, rel=2e-6)
