import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from allstep.checkpoint.holds import held_for_deletion
from allstep.checkpoint.manager import CheckpointManager
from allstep.checkpoint.state import TrainState
from allstep.checkpoint.store import checkpoint_name
from allstep.errors import CheckpointError
from allstep.testing.threads import ThreadRank, on_threads

DEADLINE = 60
"""Seconds after which a rank that waits for another gives up."""


def state(value: float = 0.0) -> TrainState:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), trainer_state={"value": value})


def manager(output_dir: Path, ranks: ThreadRank | None = None, limit: int | None = None, **options: Any) -> CheckpointManager:
    return CheckpointManager(output_dir, ranks or ThreadRank(0, 1, threading.Barrier(1), [b""]), limit, **options)


def save(of: CheckpointManager, step: int, value: float | None = None) -> Path:
    return of.save(state(float(step) if value is None else value), global_step=step, epoch=step / 10, global_batch_size=16)


def steps(folder: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("checkpoint-")) for path in folder.iterdir() if path.name.startswith("checkpoint-")
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_saved_is_loaded_by_every_rank(size: int, tmp_path: Path) -> None:
    def body(ranks: ThreadRank) -> Any:
        checkpoints = manager(tmp_path / "run", ranks)
        checkpoints.prepare()
        path = save(checkpoints, 20, 0.25)
        assert checkpoints.newest() == path
        found = checkpoints.resolve(True)
        assert found == path
        filled = state()
        restored = checkpoints.load(path, filled)
        assert restored.generators is not None
        return path, restored.trainer_state, restored.manifest, filled.model.weight.tolist()

    outcomes = on_threads(size, body)
    path, trainer_state, manifest, weights = outcomes[0]
    assert path == tmp_path / "run" / "checkpoint-20"
    assert trainer_state == {"value": 0.25}
    assert weights == [[0.25, 0.25]]
    assert (manifest.global_step, manifest.epoch, manifest.world_size, manifest.global_batch_size) == (20, 2.0, size, 16)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    rng = ["rng_state.pth"] if size == 1 else [f"rng_state_{rank}.pth" for rank in range(size)]
    assert sorted(path.name for path in path.iterdir()) == sorted(
        ["manifest.json", "model.safetensors", "optimizer.pt", "trainer_state.json", "training_args.json", *rng]
    )
    assert set(manifest.files) == {path.name for path in path.iterdir()} - {"manifest.json"}


def test_no_checkpoint_is_none_for_newest_and_an_error_for_resume(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    assert checkpoints.newest() is None
    assert manager(tmp_path / "nowhere").newest() is None
    assert checkpoints.resolve(None) is None
    assert checkpoints.resolve(False) is None
    with pytest.raises(CheckpointError, match=r"found no whole checkpoint in .* resume_from_checkpoint=False"):
        checkpoints.resolve(True)


def test_auto_is_the_newest_whole_one_or_the_beginning_with_a_line(tmp_path: Path) -> None:
    lines: list[str] = []
    outcomes = on_threads(2, lambda ranks: manager(tmp_path, ranks, say=lines.append).resolve("auto"))
    assert outcomes == [None, None]
    assert lines == [f'resume_from_checkpoint="auto" found no whole checkpoint in {tmp_path}: starting at the beginning']
    path = save(manager(tmp_path), 20)
    assert on_threads(2, lambda ranks: manager(tmp_path, ranks, say=lines.append).resolve("auto")) == [path, path]
    (path / "optimizer.pt").write_bytes(b"short")
    with pytest.warns(UserWarning, match=r"Passed over .*checkpoint-20: optimizer\.pt has 5 bytes"):
        assert manager(tmp_path, say=lines.append).resolve("auto") is None
    assert len(lines) == 2


@pytest.mark.parametrize("text", ["true", "True", "false", "FALSE", "auto", "Auto"])
def test_what_a_command_line_has_for_true_and_false_means_that(text: str, tmp_path: Path) -> None:
    path = save(manager(tmp_path), 20)
    assert manager(tmp_path).resolve(text) == (None if text.lower() == "false" else path)
    named_so = path.rename(tmp_path / text)
    assert manager(tmp_path).resolve(str(named_so)) == named_so, "a path is a path"


def test_what_one_run_found_to_go_on_from_no_other_deletes_before_it_is_loaded(tmp_path: Path) -> None:
    lines: list[str] = []
    resuming, training = manager(tmp_path), manager(tmp_path, limit=1, say=lines.append)
    save(training, 10)
    path = resuming.resolve(True)
    assert path == tmp_path / "checkpoint-10"
    save(training, 20)
    assert steps(tmp_path) == [10, 20]
    assert lines == [f"Old checkpoint {path} is read by another process; it stays until the next save."]
    resuming.load(path, state())
    save(training, 30)
    assert steps(tmp_path) == [30]
    assert len(lines) == 1


def test_what_is_not_loaded_is_not_held(tmp_path: Path) -> None:
    """A path that was refused, one that was passed over, and one that did not fit."""
    limited = manager(tmp_path, limit=1)
    path = save(limited, 10)
    with pytest.raises(CheckpointError):
        manager(tmp_path).load(path, TrainState(model=nn.Linear(3, 1)))
    (path / "optimizer.pt").write_bytes(b"short")
    others = [manager(tmp_path), manager(tmp_path)]
    with pytest.warns(UserWarning, match="Passed over"):
        others[0].newest()
    with pytest.raises(CheckpointError, match="is damaged"):
        others[1].resolve(path)
    save(limited, 20)
    assert steps(tmp_path) == [20]


def test_a_checkpoint_that_another_run_is_deleting_is_passed_over(tmp_path: Path) -> None:
    older, newer = save(manager(tmp_path), 10), save(manager(tmp_path), 20)
    with held_for_deletion(newer), pytest.warns(UserWarning, match="Passed over .*20: another process deletes it"):
        assert manager(tmp_path).newest() == older


def test_a_save_that_failed_deletes_nothing(tmp_path: Path) -> None:
    for step in (10, 20):
        save(manager(tmp_path), step)

    def hook(action: str, path: Path) -> None:
        if action == "rename" and path.name == "checkpoint-30":
            raise OSError(28, "No space left on device", str(path))

    failing = manager(tmp_path, limit=1, hook=hook)
    with pytest.raises(CheckpointError):
        save(failing, 30)
    assert steps(tmp_path) == [10, 20]
    save(failing, 40)
    assert steps(tmp_path) == [40]


def test_names_that_wrappers_added_are_told_in_a_line_on_rank_zero(tmp_path: Path) -> None:
    path = save(manager(tmp_path), 20)
    (path / "manifest.json").unlink()
    (path / "training_args.json").unlink()
    weights = load_file(path / "model.safetensors")
    save_file({f"module.{name}": value for name, value in weights.items()}, path / "model.safetensors")
    lines: list[str] = []

    def body(ranks: ThreadRank) -> None:
        manager(tmp_path, ranks, say=lines.append).load(path, replace(state(), with_generators=False))

    with pytest.warns(UserWarning, match=r"has no manifest\.json"):
        assert on_threads(2, body) == [None, None]
    assert lines == [f"the weights in {path} have names with module., as wrappers write them; they were read without"]


def test_a_path_that_is_no_folder_is_an_error_on_every_rank(tmp_path: Path) -> None:
    outcomes = on_threads(2, lambda ranks: manager(tmp_path, ranks).resolve(tmp_path / "checkpoint-7"))
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert "checkpoint-7 is no folder" in str(outcomes[1])
    assert [outcome.collateral for outcome in outcomes] == [False, True]


def test_newest_passes_over_damaged_ones_and_names_file_and_reason(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    for step in (9, 10, 100):
        save(checkpoints, step)
    (tmp_path / "checkpoint-100" / "optimizer.pt").write_bytes(b"short")
    (tmp_path / "checkpoint-10" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="Passed over") as caught:
        assert checkpoints.newest() == tmp_path / "checkpoint-9"
    told = [str(warning.message) for warning in caught]
    assert len(told) == 2
    assert told[0].startswith(f"Passed over {tmp_path}/checkpoint-100: optimizer.pt has 5 bytes,")
    assert told[1] == f"Passed over {tmp_path}/checkpoint-10: manifest.json is missing."


def test_only_rank_zero_warns_and_all_get_the_same_answer(tmp_path: Path) -> None:
    save(manager(tmp_path), 10)
    save(manager(tmp_path), 20)
    (tmp_path / "checkpoint-20" / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"model\.safetensors is missing") as caught:
        outcomes = on_threads(3, lambda ranks: manager(tmp_path, ranks).newest())
    assert outcomes == [tmp_path / "checkpoint-10"] * 3
    assert len(caught) == 1


def test_a_damaged_path_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    save(manager(tmp_path), 10)
    path = save(manager(tmp_path), 20)
    (path / "optimizer.pt").write_bytes(b"short")
    for call in (lambda: manager(tmp_path).resolve(str(path)), lambda: manager(tmp_path).load(path, state())):
        with pytest.raises(CheckpointError, match=r"checkpoint-20 is damaged: optimizer\.pt has 5 bytes"):
            call()
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: manifest\.json is missing"):
        manager(tmp_path).resolve(path)


def hugging_face_folder(folder: Path) -> Path:
    path = save(manager(folder), 20, 0.5)
    (path / "manifest.json").unlink()
    (path / "training_args.json").unlink()
    (path / "training_args.bin").write_bytes(pickle.dumps("never read"))
    return path


def test_a_folder_of_hugging_faces_is_taken_with_one_warning_if_its_path_is_given(tmp_path: Path) -> None:
    path = hugging_face_folder(tmp_path)
    checkpoints, filled = manager(tmp_path), state()
    with pytest.warns(UserWarning, match=r"has no manifest\.json") as caught:
        restored = checkpoints.load(checkpoints.resolve(path) or "", filled)
    assert len(caught) == 1
    assert restored.manifest is None
    assert restored.training_args == {}
    assert filled.model.weight.tolist() == [[0.5, 0.5]]


def test_a_folder_of_hugging_faces_is_not_found_by_itself(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path)
    with pytest.warns(UserWarning, match="To resume from it all the same, pass its path"):
        assert manager(tmp_path).newest() is None


def test_a_folder_of_hugging_faces_with_a_pickled_optimizer_is_refused(tmp_path: Path) -> None:
    path = hugging_face_folder(tmp_path)
    (path / "optimizer.pt").write_bytes(pickle.dumps({"state": {}}))
    with (
        pytest.warns(UserWarning, match=r"has no manifest\.json"),
        pytest.raises(CheckpointError, match=r"Rank 0 could not load .*optimizer\.pt in .* was not written by torch\.save"),
    ):
        manager(tmp_path).load(path, state())


def test_another_world_size_loads_but_says_that_generators_start_anew(tmp_path: Path) -> None:
    path = on_threads(2, lambda ranks: save(manager(tmp_path, ranks), 20))[0]
    with pytest.warns(UserWarning, match="was saved by 2 ranks and is read by 3: the random number generators") as caught:
        outcomes = on_threads(3, lambda ranks: manager(tmp_path, ranks).load(path, state()).generators)
    assert outcomes == [None] * 3
    assert len(caught) == 1


def test_a_model_that_does_not_fit_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    path = save(manager(tmp_path), 20)

    def body(ranks: ThreadRank) -> None:
        filled = state() if ranks.rank == 0 else TrainState(model=nn.Linear(3, 1), with_generators=False)
        manager(tmp_path, ranks).load(path, filled)

    outcomes = on_threads(2, body)
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert str(outcomes[0]) == str(outcomes[1])
    assert "Rank 1 could not load" in str(outcomes[0])
    assert "weight has shape (1, 2) in the files, (1, 3) in the model" in str(outcomes[0])
    assert [outcome.collateral for outcome in outcomes] == [True, False]


def test_the_newest_are_kept_and_the_best_whatever_its_age(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, limit=2)
    for step in (10, 20, 30):
        save(checkpoints, step)
    assert steps(tmp_path) == [20, 30]
    checkpoints.best = tmp_path / "checkpoint-20"
    for step in (40, 50):
        save(checkpoints, step)
    assert steps(tmp_path) == [20, 50]
    checkpoints.best = Path("elsewhere") / "checkpoint-50"
    save(checkpoints, 60)
    assert steps(tmp_path) == [50, 60]


def test_no_limit_keeps_all(tmp_path: Path) -> None:
    for limit, step in ((None, 10), (0, 20), (None, 30)):
        save(manager(tmp_path, limit=limit), step)
    assert steps(tmp_path) == [10, 20, 30]


def test_later_checkpoints_of_another_run_are_left_alone(tmp_path: Path) -> None:
    for step in (10, 100):
        save(manager(tmp_path), step)
    save(manager(tmp_path, limit=1), 20)
    assert steps(tmp_path) == [20, 100]


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path: Path) -> None:
    def hook(action: str, path: Path) -> None:
        if path.name == "staging-removed-checkpoint-10":
            raise PermissionError(13, "Permission denied", str(path))

    checkpoints = manager(tmp_path, limit=1, hook=hook)
    save(checkpoints, 10)
    with pytest.warns(UserWarning, match=r"checkpoint-10 could not be deleted: .*Permission denied"):
        save(checkpoints, 20)
    assert 20 in steps(tmp_path)


def test_nothing_is_deleted_while_a_rank_reads(tmp_path: Path) -> None:
    """Rank 0 has read its part and would go on to a save that deletes; it waits until rank 1, which is slow, has read too."""
    path = on_threads(2, lambda ranks: save(manager(tmp_path, ranks), 10))[0]
    rank_zero_has_read, seen = threading.Event(), []

    class Optimizer:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if self.rank == 0:
                rank_zero_has_read.set()
            else:
                assert rank_zero_has_read.wait(DEADLINE)
                seen.append(path.exists())

    def body(ranks: ThreadRank) -> None:
        checkpoints = manager(tmp_path, ranks, limit=1)
        slow = TrainState(model=nn.Linear(2, 1), optimizer=Optimizer(ranks.rank))
        checkpoints.load(path, slow)
        save(checkpoints, 20)

    assert on_threads(2, body) == [None, None]
    assert seen == [True]
    assert steps(tmp_path) == [20]


def test_preparing_makes_the_folder_and_leaves_no_trace_in_it(tmp_path: Path) -> None:
    on_threads(2, lambda ranks: manager(tmp_path / "deep" / "run", ranks).prepare())
    assert list((tmp_path / "deep" / "run").iterdir()) == []


def test_preparing_brings_the_names_of_new_folders_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        flushed.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    manager(tmp_path / "deep" / "run").prepare()
    assert [name for name in flushed if "probe" not in name] == [".", "deep"]
    flushed.clear()
    manager(tmp_path / "deep" / "run").prepare()
    assert [name for name in flushed if "probe" not in name] == []


def test_preparing_clears_what_a_killed_run_left(tmp_path: Path) -> None:
    save(manager(tmp_path), 10)
    (tmp_path / "staging-checkpoint-20").mkdir()
    (tmp_path / "staging-checkpoint-20" / "optimizer.pt").write_text("half")
    on_threads(2, lambda ranks: manager(tmp_path, ranks).prepare())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10"]


def test_the_model_alone_is_written_straight_into_the_folder(tmp_path: Path) -> None:
    filled = state(0.5)
    assert on_threads(2, lambda ranks: manager(tmp_path / "run", ranks).save_model(filled)) == [tmp_path / "run"] * 2
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["model.safetensors"]
    assert manager(tmp_path).save_model(filled, tmp_path / "else") == tmp_path / "else"
    assert (tmp_path / "else" / "model.safetensors").exists()


def test_a_checkpoint_says_by_what_it_was_written(tmp_path: Path) -> None:
    import allstep

    checkpoints = manager(tmp_path)
    manifest = checkpoints.load(save(checkpoints, 20), state()).manifest
    assert manifest is not None
    assert manifest.allstep_version == allstep.__version__
    assert manifest.torch_version == torch.__version__
    assert manifest.created.endswith("+00:00")
    assert checkpoint_name(20) == "checkpoint-20"
