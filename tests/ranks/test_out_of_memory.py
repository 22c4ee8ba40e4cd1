"""A rank that runs out of memory: all go on with smaller micro-batches, and with the global batch as it was."""

import pytest
import torch

from allstep import Trainer, TrainerCallback, TrainingArguments
from allstep.comm.agreement import digest
from allstep.errors import AllstepError
from allstep.testing.models import Regression, RegressionNet
from allstep.testing.ranks import RankPool
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


class AtOptimizer(TrainerCallback):
    """Fails behind the reduction, where the optimizer is about to move."""

    decides_alike = True

    def __init__(self, error):
        self.error = error

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise self.error


def fail_behind_the_reduction(rank, size, folder, who, error, timeout=60):
    args = TrainingArguments(
        str(folder),
        ddp_timeout=timeout,
        max_steps=5,
        auto_find_batch_size=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    callbacks = [AtOptimizer(error)] if rank in who else []
    trainer = Trainer(RegressionNet(), args, train_dataset=Regression(200), callbacks=callbacks)
    try:
        trainer.train()
    except Exception as problem:
        return type(problem).__name__, trainer.state.global_step
    return "nothing", trainer.state.global_step


@pytest.mark.parametrize("error", [ValueError("mine"), torch.OutOfMemoryError("CUDA out of memory")])
def test_behind_the_reduction_nothing_is_taken_again(ranks, tmp_path, error):
    kind = type(error).__name__
    assert ranks.run(fail_behind_the_reduction, tmp_path, (0, 1), error) == [(kind, 2)] * 2


@pytest.mark.long
def test_an_error_of_one_rank_behind_the_reduction_is_its_own_at_once(backend, tmp_path):
    with RankPool(2, backend=backend, timeout=20) as pool:
        found = pool.outcomes(fail_behind_the_reduction, tmp_path, (1,), ValueError("mine"), 3)
    assert [outcome.value for outcome in found] == [("CollectiveError", 3), ("ValueError", 2)]


class Counting(Large):
    """Whose buffers count forwards."""

    def __init__(self, most=None):
        super().__init__(most)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x, labels=None):
        self.forwards += 1
        return super().forward(x, labels)


def count_forwards(rank, size, folder, most):
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=8,
        auto_find_batch_size=True,
        ddp_broadcast_buffers=False,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(Counting(most), args, train_dataset=Regression(200))
    trainer.train()
    return int(trainer.model.forwards)


def test_buffers_are_as_before_when_a_step_is_taken_again(ranks, tmp_path):
    assert ranks.run(count_forwards, tmp_path, None) == [8, 8]
    assert ranks.run(count_forwards, tmp_path, 2)[0] == 5 + 2 * 3
