"""Pickles of others: never run, and refused with lines that convert them, which do."""

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allstep.checkpoint.manager import CheckpointManager
from allstep.checkpoint.state import TrainState
from allstep.errors import CheckpointError
from allstep.testing.threads import ThreadRank


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def state() -> TrainState:
    model = nn.Linear(2, 2)
    return TrainState(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        scheduler=torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters()), lambda step: 1.0),
    )


def manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, ThreadRank.alone())


def foreign_folder(folder: Path) -> Path:
    """A checkpoint as others leave one: no manifest, and all that can be pickled is."""
    path = manager(folder).save(state(), global_step=20, epoch=1.0, global_batch_size=8)
    for name in ("manifest.json", "training_args.json"):
        (path / name).unlink()
    torch.save(Harmful(folder / "harm"), path / "training_args.bin")  # in every folder of Hugging Face's; nobody reads it
    return path


def load(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has no manifest
        manager(path.parent).load(path, state())


def advised(error: CheckpointError) -> str:
    """The Python that the message says to type."""
    text = str(error)
    return text[text.index("import torch") :]


FILES = ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model_extra_state.pt"]


@pytest.mark.parametrize("forced", [False, True], ids=["", "though the environment asks for it"])
@pytest.mark.parametrize("form", ["torch", "torch's older", "pickle"])
@pytest.mark.parametrize("name", [*FILES, "pytorch_model.bin"])
def test_no_file_of_a_checkpoint_runs_code(
    name: str, form: str, forced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = foreign_folder(tmp_path)
    if name == "pytorch_model.bin":
        (path / "model.safetensors").unlink()
    value = {"weight": Harmful(tmp_path / "harm")}
    if form == "pickle":
        (path / name).write_bytes(pickle.dumps(value))
    else:
        torch.save(value, path / name, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(CheckpointError, match=name):
        load(path)
    assert not (tmp_path / "harm").exists()
    torch.load(path / "training_args.bin", weights_only=False)
    assert (tmp_path / "harm").exists(), "it does harm where somebody reads it"


def test_weights_in_another_format_are_read_after_the_line_that_the_error_says_to_type(tmp_path: Path) -> None:
    path = foreign_folder(tmp_path)
    (path / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(2, 2)}, path / "pytorch_model-00001-of-00002.bin")
    torch.save({"bias": torch.zeros(2)}, path / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model-00001-of-00002\.bin is a pickled file") as raised:
        load(path)
    assert "weights_only=True" in advised(raised.value)
    exec(advised(raised.value))
    load(path)


def test_that_line_does_not_run_code_either(tmp_path: Path) -> None:
    path = foreign_folder(tmp_path)
    (path / "model.safetensors").unlink()
    torch.save({"weight": Harmful(tmp_path / "harm")}, path / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as raised:
        load(path)
    with pytest.raises(pickle.UnpicklingError):
        exec(advised(raised.value))
    assert not (tmp_path / "harm").exists()


def test_an_optimizer_in_torchs_older_format_is_read_after_its_line(tmp_path: Path) -> None:
    path = foreign_folder(tmp_path)
    saved = torch.load(path / "optimizer.pt", weights_only=True)
    torch.save(saved, path / "optimizer.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt in .* was not written by torch\.save\. If it is whole") as raised:
        load(path)
    exec(advised(raised.value))
    load(path)


def test_an_optimizer_with_objects_beside_its_state_is_read_after_its_line(tmp_path: Path) -> None:
    path = foreign_folder(tmp_path)
    saved = torch.load(path / "optimizer.pt", weights_only=True)
    torch.save(saved | {"tracker": torch.nn.Identity()}, path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"it names torch\.nn\.modules.* If you trust whoever wrote it") as raised:
        load(path)
    exec(advised(raised.value))
    load(path)
