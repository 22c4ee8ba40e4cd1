"""1, 2 and 4 ranks with one global batch end with the same bits: weights, logged losses, norms of gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.comm.agreement import digest
from allstep.testing.ranks import one_thread
from allstep.trainer.throughput import MEASURED

BACKENDS = ("gloo", "shm")

CONTEXT, BYTES = 12, 32


class Lines(Dataset):
    """Sequences of 3 to 12 tokens, filled up; labels are the next tokens, and -100 behind the end."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        tokens = torch.randint(BYTES, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))
        labels = tokens[1:].clone()
        labels[3 + index * 7 % 10 :] = -100
        return {"tokens": tokens[:-1], "labels": labels}


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout, self.width = nn.Dropout(dropout), width

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 4, self.width // 4).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


class GPT(nn.Module):
    """With one weight for embedding and head, and a place embedding that short batches use in part only."""

    def __init__(self, dropout=0.1, width=32):
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.place = nn.Embedding(BYTES, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, tokens, labels):
        x = self.dropout(self.embed(tokens) + self.place.weight)
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.embed.weight.T
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Gradients(TrainerCallback):
    def __init__(self):
        self.digests = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.digests.append(digest([(name, parameter.grad) for name, parameter in model.named_parameters()]))


def train(rank, size, folder, arguments, samples=43):
    gradients = Gradients()
    settings = {
        "per_device_train_batch_size": 2,
        "global_batch_size": 16,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = TrainingArguments(str(folder), **{**settings, **arguments})
    trainer = Trainer(GPT(), args, train_dataset=Lines(samples), callbacks=[gradients])
    trainer.train()
    logs = [{key: value for key, value in entry.items() if key not in MEASURED} for entry in trainer.state.log_history]
    return {
        "weights": [p.detach().clone() for p in trainer.model.parameters()],
        "logs": [entry for entry in logs if "loss" in entry],
        "gradients": gradients.digests,
        "aside": trainer.last_run.model.gradients_aside,
        "optimizer": [value for state in trainer.optimizer.state.values() for value in state.values()],
    }


def in_one_process(folder, arguments, samples=43):
    with one_thread():
        return train(0, 1, folder, arguments, samples)


def assert_same_bits(run, reference):
    assert run["logs"] == reference["logs"]
    assert run["gradients"] == reference["gradients"]
    for name in ("weights", "optimizer"):
        assert all(map(torch.equal, run[name], reference[name]))


def test_one_two_and_four_ranks_end_with_the_same_bits(ranks, four_ranks, tmp_path):
    """Dropout, AdamW, clipping, a cosine schedule, labels of unequal length, a tail that does not divide, two epochs."""
    arguments = {"deterministic_reduction": True}
    alone = in_one_process(tmp_path / "1", arguments)
    assert len(alone["logs"]) == 6  # ceil(43 / 16) = 3 steps an epoch
    assert alone["logs"][-1]["loss"] < alone["logs"][0]["loss"]
    for pool, size in ((ranks, 2), (four_ranks, 4)):
        for run in pool.run(train, tmp_path / str(size), arguments):
            assert_same_bits(run, alone)


def test_plain_sums_differ_which_is_why_there_is_an_order(ranks, tmp_path):
    plain = in_one_process(tmp_path / "1", {"deterministic_reduction": False})
    on_two = ranks.run(train, tmp_path / "2", {"deterministic_reduction": False})[0]
    assert plain["gradients"][0] != on_two["gradients"][0]
    for weight, other in zip(plain["weights"], on_two["weights"], strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The training dataset has")
@pytest.mark.parametrize("samples", [3, 17])
def test_few_samples_and_empty_places_give_the_same_bits(ranks, four_ranks, tmp_path, samples):
    arguments = {"deterministic_reduction": True, "num_train_epochs": 3}
    alone = in_one_process(tmp_path / "1", arguments, samples)
    for pool, size in ((ranks, 2), (four_ranks, 4)):
        assert_same_bits(pool.run(train, tmp_path / str(size), arguments, samples)[0], alone)


def test_auto_is_on_where_ranks_add_in_order_anyway(ranks, tmp_path):
    alone = in_one_process(tmp_path / "1", {})
    assert alone["aside"] == 2  # of 8 micro-batches
    for run in ranks.run(train, tmp_path / "2", {}):
        assert run["aside"] == 1  # of 4
        assert_same_bits(run, alone)
