"""Activation checkpointing in both of torch's ways, with every flag: right gradients, or one error that says what to do."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from allstep import DistributedDataParallel
from allstep.testing.parity import assert_mean, gradients_of, mean_of_ranks


class Block(nn.Module):
    """A layer, and another that is used only where the block is told so."""

    def __init__(self, spare: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if spare:
            self.spare = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh()


class Tasks(nn.Module):
    """A trunk of checkpointed blocks and two heads.

    `kind`: "once": each block runs once · "again": the trunk runs three times in one forward · "spare": a layer in a block is
    never used · "tasks": a forward runs the trunk once for each task it is given, and only those heads · "tied": a weight
    inside the checkpointed blocks is also used outside of them.
    """

    def __init__(self, kind: str, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(4, 4)  # its output requires gradients, without which a reentrant block has none
        self.blocks = nn.ModuleList(Block(kind == "spare") for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
        self.kind, self.reentrant = kind, reentrant

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x

    def forward(self, x: torch.Tensor, tasks: str) -> dict[str, torch.Tensor]:
        x = self.stem(x)
        if self.kind == "again":
            x = self.trunk(self.trunk(x))
        if self.kind == "tasks":
            return {task: self.heads[task](self.trunk(x)) for task in tasks}
        features = self.trunk(x)
        out = {task: self.heads[task](features) for task in tasks}
        if self.kind == "tied":
            out["tied"] = x @ self.blocks[0].layer.weight
        return out


# kind -> tasks of each step
PLANS = {kind: ["ab"] * 3 for kind in ("once", "again", "spare", "tied")} | {"tasks": ["a", "b", "ab", "a+b", "a"]}


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int, tasks: str) -> torch.Tensor:
    """The sum over `tasks`; where a + is among them, in two forwards."""
    outputs = [model(batch(rank, step), together) for together in tasks.split("+")]
    return sum(out.square().mean() for each in outputs for out in each.values())


def train(rank, size, kind, reentrant, options):
    """Gradients of each step, or what was said in it; and whether the optimizer moved then."""
    net = Tasks(kind, reentrant)
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step, tasks in enumerate(PLANS[kind]):
        before = [p.detach().clone() for p in net.parameters()]
        try:
            loss_of(model, rank, step, tasks).backward()
            seen.append(gradients_of(net))
            optimizer.step()
        except RuntimeError as error:
            seen.append(f"{type(error).__name__}: {error}")
            assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        with torch.no_grad():  # each step begins with the same weights, so that one after an error can be told too
            net.load_state_dict(Tasks(kind, reentrant).state_dict())
        optimizer.zero_grad()
    return seen


def reference(kind, step):
    def run(rank: int) -> nn.Module:
        net = Tasks(kind, False)
        loss_of(net, rank, step, PLANS[kind][step]).backward()
        return net

    return mean_of_ranks(2, run)


def has_to_work(kind: str, flag: bool | None, static: bool) -> bool:
    """Where each parameter gets what the flags promise; elsewhere an error that names one is as good."""
    if kind == "tied":
        return False
    if kind == "tasks":
        return flag is not False and not static
    return kind != "spare" or flag is not False or static


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("flag", [False, True, None], ids=["strict", "walk", "none"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", PLANS)
def test_checkpointed_blocks_have_the_gradients_of_one_process_or_one_error(ranks, kind, reentrant, flag, static):
    """Blocks are recomputed in backward: once or several times, for one task or two in turn, with and without unused layers.

    For each way of checkpointing, with each flag: gradients are bit-equal on all ranks and those of one process. Where flags
    promise something else than the model does, every rank reads one error that names a parameter and says what to set, before
    the optimizer moves; the steps after it are right again.
    """
    options = {"find_unused_parameters": flag, "static_graph": static}
    first, second = ranks.run(train, kind, reentrant, options)
    for step in range(len(PLANS[kind])):
        mine, other = first[step], second[step]
        if isinstance(mine, str) or isinstance(other, str):
            assert not has_to_work(kind, flag, static), mine
            for word in (mine, other):
                assert isinstance(word, str)
                assert any(name in word for name in ("blocks.", "heads.")), word
                assert any(setting in word for setting in ("find_unused_parameters", "static_graph", "use_reentrant")), word
            continue
        assert_mean([mine, other], reference(kind, step))


def non_reentrant(rank, size, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return train(rank, size, kind, False, {"find_unused_parameters": None})


@pytest.mark.parametrize("kind", PLANS)
def test_non_reentrant_checkpoints_never_need_more_than_the_default_of_none(ranks, kind):
    """Tasks that share a checkpointed trunk, in turn and together, and weights used inside and outside of checkpoints.

    With find_unused_parameters=None all of them are those of one process, without a warning.
    """
    results = ranks.run(non_reentrant, kind)
    for step in range(len(PLANS[kind])):
        assert_mean([result[step] for result in results], reference(kind, step))
