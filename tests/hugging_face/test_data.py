"""Data as Hugging Face's libraries give it: every kind trains to the same losses, stacked or padded as there."""

import random
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="it is compared with")
datasets = pytest.importorskip("datasets", reason="its datasets are read")

ARRAY = np.arange(3.0)
SETTINGS = {"per_device_train_batch_size": 2, "optim": "sgd", "learning_rate": 0.1, "save_strategy": "no", "logging_steps": 1}


@dataclass
class Row:
    input_ids: list
    label: int


# ---- the collator

ALIKE = {
    "numbers": [{"a": 1, "b": 0.5, "c": True}, {"a": 2, "b": 1.5, "c": False}],
    "labels of classes": [{"label": 1}, {"label": 0}],
    "of yes and no": [{"label": True}, {"label": False}],
    "of regression": [{"label": 1.0}, {"label": 0.5}],
    "of numpy": [{"label": np.int32(1)}, {"label": np.int32(0)}],
    "of numpy, float64": [{"label": np.float64(1)}, {"label": np.float64(0)}],
    "of tensors": [{"label": torch.tensor(1, dtype=torch.uint8)}] * 2,
    "of tensors, float64": [{"label": torch.tensor(1.0, dtype=torch.float64)}] * 2,
    "of tokens": [{"label_ids": [1, 2]}, {"label_ids": [3, 4]}],
    "of tokens, in arrays": [{"label_ids": np.array([1, 2], dtype=np.int32)}] * 2,
    "of tokens, in tensors": [{"label_ids": torch.tensor([1.0, 2])}] * 2,
    "of several classes": [{"labels": [0.5, 1]}, {"labels": [1.0, 0]}],
    "under two names": [{"label_ids": [5, 6], "label": 1}] * 2,
    "under three names": [{"labels": 3, "label_ids": [5, 6], "label": 1}] * 2,
    "that are not there": [{"label": None, "label_ids": [1, 2], "x": 1}] * 2,
    "nothing": [{"x": 1, "y": None}] * 2,
    "text": [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}],
    "arrays": [{"x": ARRAY, "y": ARRAY.astype(np.float16), "z": np.int16(3)}] * 2,
    "lists of numpy's numbers": [{"x": [np.int64(1), np.int64(2)], "y": [np.float32(1)]}] * 2,
    "lists of arrays": [{"x": [ARRAY, ARRAY]}] * 4,
    "tuples": [{"x": (1, 2)}, {"x": (3, 4)}],
    "lists of lists": [{"x": [[1, 2], [3, 4], [5, 6]]}] * 2,
    "empty lists": [{"x": []}] * 2,
    "mixed lists": [{"x": [1, 2.5], "y": [True, False]}] * 2,
    "tensors": [{"x": torch.ones(2, 3, dtype=torch.bfloat16)}] * 2,
    "a dataclass": [Row([1, 2], 1), Row([3, 4], 0)],
    "objects": [types.SimpleNamespace(x=[1, 2], label=0)] * 2,
    "encodings": [transformers.BatchEncoding({"input_ids": [1, 2], "label": 1})] * 2,
    "more columns later": [{"x": 1}, {"x": 1, "y": 2}],
}


def shown(batch):
    return {key: (value.dtype, value.tolist()) for key, value in batch.items()}


@pytest.mark.parametrize("kind", list(ALIKE))
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays is extremely slow:UserWarning")
def test_samples_are_stacked_as_transformers_stacks_them(kind):
    from allstep.data.collate import collate

    assert shown(collate(ALIKE[kind])) == shown(transformers.default_data_collator(ALIKE[kind]))


def test_tokenizers_and_sounds_are_padded_and_all_else_is_stacked():
    from allstep.data.collate import collate
    from allstep.trainer.assembly import default_collator

    class Boxes:
        def pad(self, image):
            raise AssertionError("it pads an image")

    sounds = transformers.Wav2Vec2FeatureExtractor()
    batch = default_collator(sounds)([{"input_values": [0.5] * 3}, {"input_values": [0.5] * 5}])
    assert batch["input_values"].shape == (2, 5)
    assert isinstance(default_collator(tokenizer()), transformers.DataCollatorWithPadding)
    assert default_collator(Boxes()) is default_collator(None) is collate


# ---- datasets


def tokenizer():
    from tokenizers import Tokenizer, models

    inner = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


def rows_of(lengths):
    return [
        {"input_ids": [5 + index % 7] * length, "attention_mask": [1] * length, "label": index % 3, "text": "left out"}
        for index, length in enumerate(lengths)
    ]


class Torch(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def transformed(table):
    table.set_transform(
        lambda batch: {**{name: batch[name] for name in ("input_ids", "attention_mask")}, "labels": batch["label"]}
    )
    return table


def kinds_of(rows):
    table = datasets.Dataset.from_list(rows)
    return {
        "a list": rows,
        "torch's": Torch(rows),
        "table": table,
        "part of a dict": datasets.DatasetDict(train=table)["train"],
        "as tensors": table.with_format("torch"),
        "as arrays": table.with_format("numpy"),
        "transformed": transformed(datasets.Dataset.from_list(rows)),
        "subset": torch.utils.data.Subset(table, range(len(rows))),
        "joined": torch.utils.data.ConcatDataset([table.select(range(4)), rows[4:]]),
        "stream": table.to_iterable_dataset(),
        "stream of shards": table.to_iterable_dataset(num_shards=3),
        "stream of tensors": table.with_format("torch").to_iterable_dataset(),
        "stream of a generator": datasets.IterableDataset.from_generator(lambda: iter(rows)),
        "stream, mapped": table.to_iterable_dataset().map(lambda row: {"token_type_ids": [0] * len(row["input_ids"])}),
        "torch's stream": Stream(rows),
    }


def bert():
    torch.manual_seed(3)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def train(folder, data, processing_class, seen=None, **settings):
    from allstep import Trainer, TrainingArguments

    class Watching(Trainer):
        def _prepare_inputs(self, inputs):
            if seen is not None:
                seen.append(inputs)
            return super()._prepare_inputs(inputs)

    args = TrainingArguments(folder, **{**SETTINGS, **settings})
    trainer = Watching(bert(), args, train_dataset=data, processing_class=processing_class)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def losses_of_kinds(rank, size, folder, workers, kinds, pads):
    rows = rows_of([7, 3, 5, 9, 4, 6] if pads else [6] * 6)
    settings = {"max_steps": 3 // size, "train_sampling_strategy": "sequential", "dataloader_num_workers": workers}
    return {
        kind: train(folder, data, tokenizer() if pads else None, **settings)
        for kind, data in kinds_of(rows).items()
        if kinds is None or kind in kinds
    }


@pytest.mark.parametrize("pads", [True, False])
def test_every_kind_of_dataset_trains_alike(one_rank, ranks, tmp_path, pads):
    losses = [
        *one_rank.run(losses_of_kinds, str(tmp_path), 0, None, pads),
        *one_rank.run(losses_of_kinds, str(tmp_path), 1, ("table", "as tensors", "transformed", "stream of shards"), pads),
    ]
    assert len(losses[0]) == 15
    assert len({tuple(each) for kinds in losses for each in kinds.values()}) == 1
    of_two = ranks.run(losses_of_kinds, str(tmp_path), 0, ("table", "torch's stream"), pads)
    assert len({tuple(each) for kinds in of_two for each in kinds.values()}) == 1


def grouped(rank, size, folder):
    """Tokens of padding in an epoch, by kind of dataset."""
    lengths = random.Random(0).choices(range(1, 30), k=48)
    rows = rows_of(lengths)
    table = datasets.Dataset.from_list(rows)
    cases = {
        "random": (table, {"train_sampling_strategy": "random"}),
        "table": (table, {}),
        "with a length": (table.add_column("length", lengths), {}),
        "with a length of another name": (table.add_column("n", lengths), {"length_column_name": "n"}),
        "transformed": (transformed(datasets.Dataset.from_list(rows)), {}),
        "a list": (rows, {}),
    }
    found = {}
    for kind, (data, settings) in cases.items():
        seen = []
        train(
            folder, data, tokenizer(), seen, **{"train_sampling_strategy": "group_by_length", "num_train_epochs": 1, **settings}
        )
        found[kind] = sum(int((batch["attention_mask"] == 0).sum()) for batch in seen)
    return found


def test_like_lengths_are_put_together(one_rank, tmp_path):
    (found,) = one_rank.run(grouped, str(tmp_path))
    scattered = found.pop("random")
    assert len(set(found.values())) == 1
    assert found["table"] < scattered / 5


def read_columns(rank, size, folder):
    """Columns that the loader's dataset has, and the error where none is left."""
    from allstep import Trainer, TrainingArguments

    table = datasets.Dataset.from_list(rows_of([3] * 4))
    trainer = Trainer(bert(), TrainingArguments(folder), train_dataset=table, processing_class=tokenizer())
    kept = trainer.get_train_dataloader().dataset.column_names
    trainer.train_dataset = table.select_columns(["text"])
    with pytest.raises(Exception, match=r"has the columns text.*expected some of attention_mask.*remove_unused_columns=False"):
        trainer.get_train_dataloader()
    return kept


def test_columns_that_the_model_does_not_take_are_not_read(one_rank, tmp_path):
    (kept,) = one_rank.run(read_columns, str(tmp_path))
    assert kept == ["input_ids", "attention_mask", "label"]
