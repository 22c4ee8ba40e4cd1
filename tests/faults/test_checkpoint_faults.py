"""Disks that fill up, folders that cannot be written, files that rot, peers that leave: what stays, and what is said."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allstep.checkpoint.manager import CheckpointManager
from allstep.checkpoint.state import TrainState
from allstep.checkpoint.store import CheckpointStore
from allstep.errors import CheckpointError, CollectiveError
from allstep.testing.threads import ThreadRank, on_threads

FILES = ["model.safetensors", "optimizer.pt", "trainer_state.json", "training_args.json", "rng_state.pth", "manifest.json"]


def state() -> TrainState:
    model = nn.Linear(2, 1)
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))


def save(manager: CheckpointManager, step: int) -> Path:
    return manager.save(state(), global_step=step, epoch=1.0, global_batch_size=8)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refuse_at(count: int, error: Callable[[Path], BaseException], fired: list[str]) -> Callable[[str, Path], None]:
    """A hook that lets `count` actions happen and refuses the next."""
    left = count

    def hook(action: str, path: Path) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            fired.append(f"{action} {path.name}")
            raise error(path)

    return hook


def no_space(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("again", [False, True], ids=["new", "replacing"])
def test_a_disk_that_fills_at_any_action_is_an_error_on_every_rank_and_leaves_no_trace(
    culprit: int, again: bool, tmp_path: Path
) -> None:
    on_threads(2, lambda ranks: save(CheckpointManager(tmp_path, ranks), 10))
    if again:
        on_threads(2, lambda ranks: save(CheckpointManager(tmp_path, ranks), 20))
    store, first = CheckpointStore(tmp_path), content(tmp_path / "checkpoint-10")
    refused = []
    for count in range(100):
        fired: list[str] = []

        def body(ranks: ThreadRank, count: int = count, fired: list[str] = fired) -> Any:
            if ranks.rank != culprit:
                return save(CheckpointManager(tmp_path, ranks), 20)
            return save(CheckpointManager(tmp_path, ranks, hook=refuse_at(count, no_space, fired)), 20)

        outcomes = on_threads(2, body)
        if not fired:
            assert outcomes == [tmp_path / "checkpoint-20"] * 2
            break
        refused += fired
        assert content(tmp_path / "checkpoint-10") == first
        assert all(store.problems(path) == [] for path in store.checkpoints())
        if fired[0].startswith("discard"):
            continue  # the new one is in, or nothing was written yet; debris that stays is for the next start
        assert all(isinstance(outcome, CheckpointError) for outcome in outcomes), fired
        assert str(outcomes[0]) == str(outcomes[1])
        assert f"Rank {culprit} could not" in str(outcomes[0])
        assert "No space left on device" in str(outcomes[0])
        assert "Older checkpoints" in str(outcomes[0])
        assert [outcome.collateral for outcome in outcomes] == [culprit == 1, culprit == 0]
        assert all(name.startswith("checkpoint-") for name in names(tmp_path)), fired
    else:
        pytest.fail("the save never came to its end")
    written = [name.removeprefix("write ") for name in refused if name.startswith("write ")]
    shared = ["model.safetensors", "optimizer.pt", "trainer_state.json", "training_args.json"]
    assert written == ([*shared, "rng_state_0.pth", "manifest.json"] if culprit == 0 else ["rng_state_1.pth"])
    assert any(name.startswith("sync ") for name in refused)


def test_the_message_names_rank_file_folder_reason_and_what_to_do(tmp_path: Path) -> None:
    def body(ranks: ThreadRank) -> Any:
        hook = refuse_at(0, no_space, []) if ranks.rank == 1 else lambda action, path: None
        return save(CheckpointManager(tmp_path, ranks, hook=hook), 20)

    refused = (
        f"Rank 1 could not write checkpoint-20. rng_state_1.pth could not be written to {tmp_path}/staging-checkpoint-20: "
        f"No space left on device. "
    )
    assert str(on_threads(2, body)[0]) == f"{refused}No checkpoint is in {tmp_path} yet."
    save(CheckpointManager(tmp_path, ThreadRank.alone()), 10)
    assert str(on_threads(2, body)[0]) == (
        f"{refused}Older checkpoints in {tmp_path} are untouched; resume_from_checkpoint=True goes on from the newest."
    )


REFUSED_BY_THE_SYSTEM = """
import resource, sys, threading
import torch
from allstep.checkpoint.manager import CheckpointManager
from allstep.checkpoint.state import TrainState
from allstep.comm.communicator import SoloCommunicator
from allstep.errors import CheckpointError

model = torch.nn.Linear(300, 200)  # 240 kB
optimizer = torch.optim.AdamW(model.parameters())
model(torch.rand(2, 300)).sum().backward()
optimizer.step()
manager = CheckpointManager(sys.argv[1], SoloCommunicator())
state = TrainState(model=model, optimizer=optimizer)
manager.save(state, global_step=10, epoch=1.0, global_batch_size=8)
for limit in (400_000, 100_000, 1_000):  # optimizer.pt has 480 kB, model.safetensors 240 kB, rng_state.pth 14 kB
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        manager.save(state, global_step=20, epoch=2.0, global_batch_size=8)
        print("saved")
    except CheckpointError as error:
        print(error)
model = TrainState(model=torch.nn.Linear(1, 1))
try:
    manager.save(model, global_step=20, epoch=2.0, global_batch_size=8)
    print("saved")
except CheckpointError as error:
    print(error)
"""


@pytest.mark.long
def test_what_the_system_itself_refuses_in_the_middle_of_a_file_is_reported_with_its_reason(tmp_path: Path) -> None:
    """The C++ and Rust code that writes tensors has errors of its own kinds; here it meets a real one, from write(2)."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED_BY_THE_SYSTEM, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert "optimizer.pt could not be written" in lines[0]
    assert "model.safetensors could not be written" in lines[1]
    assert "model.safetensors could not be written" in lines[2]
    assert "rng_state.pth could not be written" in lines[3]
    assert all("File too large" in line for line in lines)
    assert names(tmp_path) == ["checkpoint-10"]
    assert CheckpointStore(tmp_path).problems(tmp_path / "checkpoint-10") == []


@pytest.mark.parametrize("where", ["below a file", "a file", "a folder of the kernel", "new in a folder of the kernel"])
def test_an_output_folder_that_cannot_be_written_is_an_error_before_training_and_on_every_rank(
    where: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    output_dir, said = {
        "below a file": (tmp_path / "file" / "deep" / "run", "could not be made: Not a directory"),
        "a file": (tmp_path / "file", "is a file; output_dir has to be a folder"),
        "a folder of the kernel": (Path("/sys/kernel"), "Files in /sys/kernel cannot be written: "),
        "new in a folder of the kernel": (Path("/sys/kernel/run/deep"), "/sys/kernel/run/deep could not be made: "),
    }[where]
    outcomes = on_threads(2, lambda ranks: CheckpointManager(output_dir, ranks).prepare())
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert said in str(outcomes[0])
    assert said in str(outcomes[1])
    assert "Rank 0 could not" in str(outcomes[1])
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_made_for_a_run_that_cannot_write_is_gone_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    outcomes = on_threads(2, lambda ranks: CheckpointManager(tmp_path / "deep" / "run", ranks).prepare())
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert "Rank 0 could not write to the output folder. Files in" in str(outcomes[0])
    assert "\nRank 1 could not write to the output folder. Files in" in str(outcomes[0])
    assert names(tmp_path) == []


def test_a_rank_that_does_not_see_the_folder_is_named(tmp_path: Path) -> None:
    """As on two hosts without a shared file system: rank 1 looks in another place."""
    there = tmp_path / "there"
    there.mkdir()
    outcomes = on_threads(2, lambda ranks: CheckpointManager(there if ranks.rank == 0 else tmp_path / "not", ranks).prepare())
    assert "is not there on rank 1. output_dir has to lie on a file system that all hosts share" in str(outcomes[0])
    assert there.exists(), "it was there before, so it stays"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["removed", "cut short", "one bit flipped", "made longer"])
@pytest.mark.parametrize("wanted", [True, "auto"])
def test_resuming_takes_the_older_one_whatever_happened_to_a_file_of_the_newer(
    name: str, damage: str, wanted: bool | str, tmp_path: Path
) -> None:
    older = save(CheckpointManager(tmp_path, ThreadRank.alone()), 10)
    newer = save(CheckpointManager(tmp_path, ThreadRank.alone()), 20)
    data = bytearray((newer / name).read_bytes())
    data[len(data) // 2] ^= 1
    {
        "removed": lambda path: path.unlink(),
        "cut short": lambda path: path.write_bytes(path.read_bytes()[:-2]),
        "one bit flipped": lambda path: path.write_bytes(data),
        "made longer": lambda path: path.write_bytes(path.read_bytes() + b"0"),
    }[damage](newer / name)
    with pytest.warns(UserWarning, match=rf"Passed over {newer}: {name} ") as caught:
        assert CheckpointManager(tmp_path, ThreadRank.alone()).resolve(wanted) == older
    assert len(caught) == 1
    with pytest.raises(CheckpointError, match=name):
        CheckpointManager(tmp_path, ThreadRank.alone()).resolve(newer)


def test_a_peer_that_dies_in_a_save_leaves_older_checkpoints_and_no_debris(tmp_path: Path) -> None:
    class PeerGone(ThreadRank):
        def all_gather_object(self, value: Any) -> list[Any]:
            if self.size == 2 and value is not None and value[1] is None and isinstance(value[0], dict):
                raise CollectiveError("Rank 0 of 2: all_gather broke off: a peer has left.")
            return [value] * self.size

    save(CheckpointManager(tmp_path, ThreadRank.alone()), 10)
    before = content(tmp_path)
    with pytest.raises(CollectiveError, match="a peer has left"):
        save(CheckpointManager(tmp_path, PeerGone(0, 2, threading.Barrier(1), [])), 20)
    assert content(tmp_path) == before
    assert names(tmp_path) == ["checkpoint-10"]


def test_ctrl_c_in_a_save_leaves_older_checkpoints_and_no_debris(tmp_path: Path) -> None:
    save(CheckpointManager(tmp_path, ThreadRank.alone()), 10)
    before = content(tmp_path)
    interrupted = 0
    for count in range(100):
        fired: list[str] = []
        hook = refuse_at(count, lambda path: KeyboardInterrupt(), fired)
        try:
            save(CheckpointManager(tmp_path, ThreadRank.alone(), hook=hook), 20)
        except KeyboardInterrupt:
            interrupted += 1
        if not fired:
            break
        assert {name: data for name, data in content(tmp_path).items() if "checkpoint-20" not in name} == before
        assert set(names(tmp_path)) <= {"checkpoint-10", "checkpoint-20"}
        assert all(CheckpointStore(tmp_path).problems(path) == [] for path in CheckpointStore(tmp_path).checkpoints())
    assert interrupted > 10
