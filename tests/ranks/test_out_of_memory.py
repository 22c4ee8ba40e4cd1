"""A rank that runs out of memory: all go on with smaller micro-batches, and with the global batch as it was."""

import pytest
import torch

from allstep import Trainer, TrainingArguments
from allstep.comm.agreement import digest
from allstep.errors import AllstepError
from allstep.testing.models import Regression, RegressionNet
from allstep.trainer.memory import is_out_of_memory, smaller

BACKENDS = ("gloo", "shm")


class Large(RegressionNet):
    """Has no memory for more than `most` samples at once, from its sixth forward on."""

    def __init__(self, most=None, error=torch.OutOfMemoryError):
        super().__init__()
        self.most, self.error, self.calls = most, error, 0

    def forward(self, x, labels=None):
        self.calls += 1
        if self.most is not None and self.calls > 5 and len(x) > self.most:
            raise self.error("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().forward(x, labels)


def train(rank, size, folder, who, most, find=True, error=torch.OutOfMemoryError, **more):
    args = TrainingArguments(
        str(folder),
        **{"per_device_train_batch_size": 4, **more},
        num_train_epochs=2,
        learning_rate=1e-2,
        auto_find_batch_size=find,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        ledger=True,
    )
    trainer = Trainer(Large(most if rank == who else None, error), args, train_dataset=Regression(60))
    try:
        trainer.train()
    except (AllstepError, RuntimeError, KeyError) as problem:
        return type(problem).__name__, str(problem), trainer.state.global_step
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return digest(trainer.model.named_parameters()), losses, trainer.state.train_batch_size


@pytest.mark.parametrize(("who", "most", "size"), [(1, 2, 2), (0, 1, 1)])
def test_all_ranks_go_on_with_smaller_micro_batches_of_the_same_samples(ranks, tmp_path, who, most, size):
    well = ranks.run(train, tmp_path / "well", who, None)
    found = ranks.run(train, tmp_path / "small", who, most)
    assert found[0][0] == found[1][0]
    for (_, losses, used), (_, expected, _) in zip(found, well, strict=True):
        assert used == size
        assert losses == pytest.approx(expected, rel=1e-5)  # a mean over parts adds in another order
        assert len(losses) == 16


def test_without_the_argument_it_is_an_error_on_all_ranks(ranks, tmp_path):
    kinds, words, steps = zip(*ranks.run(train, tmp_path, 1, 2, False), strict=True)
    assert kinds == ("RankFailedError", "OutOfMemoryError")
    assert all("out of memory" in each for each in words)
    assert steps == (5, 5)


def test_other_errors_are_not_taken_for_it(ranks, tmp_path):
    kinds, _, _ = zip(*ranks.run(train, tmp_path, 1, 2, True, KeyError), strict=True)
    assert kinds == ("RankFailedError", "KeyError")


def test_micro_batches_of_one_sample_cannot_become_smaller(ranks, tmp_path):
    found = ranks.run(train, tmp_path, 1, 0)
    assert [each[0] for each in found] == ["RankFailedError", "OutOfMemoryError"]


@pytest.mark.parametrize(("size", "next_size"), [(8, 4), (6, 3), (9, 3), (5, 1), (2, 1), (15, 5)])
def test_the_next_size_divides_the_one_before(size, next_size):
    assert smaller(size) == next_size


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shape mismatch"), False),
        (KeyError("out of memory"), False),
    ],
)
def test_what_counts_as_a_want_of_memory(error, is_one):
    assert is_out_of_memory(error) == is_one
