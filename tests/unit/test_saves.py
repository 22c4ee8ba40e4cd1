"""Saves that go on beside training: the same bytes as if it had waited, and the same ends when something goes wrong."""

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allstep.checkpoint.manager import CheckpointManager
from allstep.checkpoint.manifest import MANIFEST_FILE
from allstep.checkpoint.saves import Save
from allstep.checkpoint.state import TrainState
from allstep.checkpoint.store import CheckpointStore, Hook
from allstep.errors import CheckpointError
from allstep.testing.threads import ThreadRank, on_threads

DEADLINE = 60
"""Seconds after which a test gives up waiting."""


class Counted(nn.Module):
    """Tied weights, a buffer, views into one storage, and state that is no tensor: all that a copy can get wrong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        flat = torch.rand(6)
        self.whole, self.part = nn.Parameter(flat), nn.Parameter(flat[2:4])
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.calls: list[Any] = []

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.calls.append(len(self.calls))
        return self.head(self.embed(x)).sum() + self.whole.sum() * self.part.sum()


class Pretrained(Counted):
    """One that writes itself, which it may do only while training waits."""

    def save_pretrained(self, folder: Path) -> None:
        assert threading.current_thread().name.startswith("MainThread")
        (folder / "config.json").write_text(f'{{"seen": {self.seen.item()}}}')


class Run:
    """A model that is trained, and all that changes with it."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = Counted() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, betas=(0.9, 0.99))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.record: dict[str, Any] = {"log_history": []}

    def step(self) -> None:
        self.model(torch.randint(0, 5, (2,))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.record["log_history"].append({"loss": random.random()})

    @property
    def state(self) -> TrainState:
        return TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            trainer_state=self.record,
            training_args={"a": 1},
        )


def begin(output_dir: Path, ranks: ThreadRank, state: TrainState, hook: Hook = lambda action, path: None) -> Save:
    facts = {"global_step": 20, "epoch": 1.0, "global_batch_size": 8}
    return Save(CheckpointStore(output_dir, hook), ranks, state, facts, in_background=True)


def content(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint; the manifest tells the time."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_FILE}


@pytest.fixture(autouse=True)
def _generators() -> Any:
    before = random.getstate(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    torch.set_rng_state(before[1])


@pytest.mark.parametrize("kind", [Counted, Pretrained])
def test_what_is_written_beside_training_is_what_stood_when_it_began(kind: type[Counted], tmp_path: Path) -> None:
    """The thread waits at each file until another step has been taken: whatever it read of the live run would show."""
    run, stepped, at_file = Run(kind()), threading.Event(), threading.Event()
    for _ in range(3):
        run.step()
    waited = CheckpointManager(tmp_path / "waited", ThreadRank.alone())
    expected = content(waited.save(run.state, global_step=20, epoch=1.0, global_batch_size=8))
    steps = 0

    def hook(action: str, path: Path) -> None:
        if action == "write" and path.name != MANIFEST_FILE:
            at_file.set()
            assert stepped.wait(DEADLINE)
            stepped.clear()

    save = begin(tmp_path / "beside", ThreadRank.alone(), run.state, hook)
    while not save.is_written:
        if at_file.wait(0.01):
            at_file.clear()
            run.step()
            steps += 1
            stepped.set()
    path = save.finish()
    assert steps >= 6, "training went on while each of the files was still to be written"
    assert content(path) == expected
    assert CheckpointStore(tmp_path).problems(path) == []


def test_no_rank_talks_from_a_thread_of_its_own(tmp_path: Path) -> None:
    talking: set[str] = set()

    class Listening(ThreadRank):
        def all_gather_object(self, value: Any) -> list[Any]:
            talking.add(threading.current_thread().name)
            return super().all_gather_object(value)

    writing: set[str] = set()

    def body(ranks: ThreadRank) -> Path:
        listening = Listening(ranks.rank, ranks.size, ranks._meeting, ranks._slots)
        hook = lambda action, path: writing.add(threading.current_thread().name)  # noqa: E731
        return begin(tmp_path, listening, Run().state, hook).finish()

    assert on_threads(2, body) == [tmp_path / "checkpoint-20"] * 2
    assert not any(name.startswith("allstep-checkpoint") for name in talking)
    assert any(name.startswith("allstep-checkpoint-20") for name in writing)


def no_space(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def refuse_at(count: int, error: Callable[[Path], BaseException], fired: list[str]) -> Hook:
    left = count

    def hook(action: str, path: Path) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            fired.append(f"{action} {path.name}")
            raise error(path)

    return hook


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_disk_that_fills_at_any_action_in_the_thread_is_an_error_on_every_rank_and_leaves_no_trace(
    culprit: int, tmp_path: Path
) -> None:
    for count in range(100):
        fired: list[str] = []

        def body(ranks: ThreadRank, count: int = count, fired: list[str] = fired) -> Any:
            refusing = refuse_at(count, no_space, fired) if ranks.rank == culprit else lambda action, path: None
            return begin(tmp_path, ranks, Run().state, refusing).finish()

        outcomes = on_threads(2, body)
        if not fired:
            assert outcomes == [tmp_path / "checkpoint-20"] * 2
            break
        assert all(isinstance(outcome, CheckpointError) for outcome in outcomes), fired
        assert str(outcomes[0]) == str(outcomes[1])
        assert f"Rank {culprit} could not" in str(outcomes[0])
        assert "No space left on device" in str(outcomes[0])
        assert [outcome.by_file_system for outcome in outcomes] == [True, True]
        if fired[0] == f"sync folder {tmp_path.name}":
            (tmp_path / "checkpoint-20").rename(tmp_path / "gone")  # it had come in, but perhaps not to the disk
            break
        assert list(tmp_path.iterdir()) == [], fired
    else:
        pytest.fail("the save never came to its end")


def test_only_what_the_file_system_refused_on_every_rank_is_called_so(tmp_path: Path) -> None:
    def body(ranks: ThreadRank) -> Any:
        run = Run()
        if ranks.rank == 0:
            run.scheduler.state_dict = lambda: {"shape": body}  # type: ignore[method-assign]
        refusing = refuse_at(0, no_space, []) if ranks.rank == 1 else lambda action, path: None
        return begin(tmp_path, ranks, run.state, refusing).finish()

    outcomes = on_threads(2, body)
    assert "scheduler.pt would hold something that cannot be read back" in str(outcomes[0])
    assert "No space left on device" in str(outcomes[0])
    assert [outcome.by_file_system for outcome in outcomes] == [False, False]


def test_what_cannot_be_copied_is_an_error_at_once_and_leaves_no_trace(tmp_path: Path) -> None:
    def body(ranks: ThreadRank) -> Any:
        run = Run()
        if ranks.rank == 0:
            run.optimizer.state_dict = lambda: {"lock": threading.Lock()}  # type: ignore[method-assign]
        return begin(tmp_path, ranks, run.state)

    outcomes = on_threads(2, body)
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert "Rank 0 could not copy what checkpoint-20 is made of. TypeError: cannot pickle" in str(outcomes[1])
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_abandoned_stops_after_the_file_at_hand_and_leaves_no_trace(tmp_path: Path) -> None:
    began, go_on, written = threading.Event(), threading.Event(), []

    def hook(action: str, path: Path) -> None:
        if action == "write":
            written.append(path.name)
            began.set()
            assert go_on.wait(DEADLINE)

    save = begin(tmp_path, ThreadRank.alone(), Run().state, hook)
    assert began.wait(DEADLINE)
    assert not save.is_written
    save._given_up.set()
    go_on.set()
    save.abandon()
    assert written == ["model.safetensors"]
    assert list(tmp_path.iterdir()) == []
    assert not any(thread.name.startswith("allstep-checkpoint") for thread in threading.enumerate())


def test_the_copies_share_what_the_originals_share_and_nothing_with_them() -> None:
    from allstep.checkpoint.plain_files import copied

    betas, flat = (0.9, 0.99), torch.rand(4)
    value = {"groups": [{"betas": betas}, {"betas": betas}], "views": [flat[:2], flat[2:], flat], "same": flat}
    copy = copied(value)
    assert copy["groups"][0]["betas"] is copy["groups"][1]["betas"]
    assert copy["views"][2] is copy["same"]
    assert copy["views"][1].untyped_storage().data_ptr() == copy["same"].untyped_storage().data_ptr()
    flat.zero_()
    assert copy["same"].count_nonzero() == 4
