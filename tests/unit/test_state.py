import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from allstep.checkpoint.plain_files import read_json, read_plain, write_json, write_plain
from allstep.checkpoint.state import TrainState, live_files, read_state, restore_state, rng_file
from allstep.errors import CheckpointError


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class WideMoments(torch.optim.Optimizer):
    """Keeps fp32 and integer state for parameters of any dtype, as mixed-precision optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.1, dtype=torch.float64)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["moment"] = (
                    state.get("moment", torch.zeros_like(parameter, dtype=torch.float32)) + parameter.grad.float() / 3
                )
                state["codes"] = torch.arange(parameter.numel(), dtype=torch.uint8)
                state["step"] = state.get("step", 0) + 1


def run(dtype: torch.dtype = torch.float32, kind: Any = torch.optim.AdamW, steps: int = 3) -> TrainState:
    """A model, its optimizer and its schedule after `steps` steps."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(dtype)
    optimizer = kind(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step) if kind is torch.optim.AdamW else None
    state = TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        trainer_state={"global_step": steps, "log_history": [{"loss": 0.1 + 0.2}]},
        training_args={"seed": 42},
    )
    for _ in range(steps):
        train(state)
    return state


def train(state: TrainState) -> Tensor:
    loss = state.model(torch.rand(2, 3, dtype=next(state.model.parameters()).dtype)).sum()
    loss.backward()
    state.optimizer.step()  # type: ignore[union-attr]
    state.optimizer.zero_grad()  # type: ignore[union-attr]
    if state.scheduler is not None:
        state.scheduler.step()  # type: ignore[attr-defined]
    return loss.detach()


def write(state: TrainState, folder: Path, rank: int = 0, world_size: int = 1) -> list[str]:
    files = live_files(state, rank, world_size)
    return [name for write_files in files.values() for name in write_files(folder)]


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, in value, dtype, device and strides."""
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor)
            and one.dtype == other.dtype
            and one.device == other.device
            and one.stride() == other.stride()
            and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_a_checkpoint_has_hugging_faces_files(tmp_path: Path) -> None:
    names = write(run(), tmp_path)
    assert sorted(names) == [
        "model.safetensors",
        "optimizer.pt",
        "rng_state.pth",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.json",
    ]
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())


def test_generators_are_kept_by_rank() -> None:
    assert [rng_file(0, 1), rng_file(0, 2), rng_file(1, 2)] == ["rng_state.pth", "rng_state_0.pth", "rng_state_1.pth"]


def test_a_run_that_saves_the_model_only_has_nothing_to_resume_from(tmp_path: Path) -> None:
    state = TrainState(model=nn.Linear(2, 2), with_generators=False)
    assert sorted(write(state, tmp_path)) == ["model.safetensors", "trainer_state.json", "training_args.json"]
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is missing"):
        read_state(tmp_path, run(), 0, 1)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_training_goes_on_bit_for_bit(kind: Any, tmp_path: Path) -> None:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        old = run(kind=kind)
        write(old, tmp_path)
        expected = [train(old) for _ in range(3)]
        new = run(kind=kind, steps=0)
        read = read_state(tmp_path, new, 0, 1)
        restore_state(read, new, tmp_path)
        assert read.trainer_state == {"global_step": 3, "log_history": [{"loss": 0.1 + 0.2}]}
        assert read.training_args == {"seed": 42}
        assert read.generators is not None
        read.generators.restore()
        assert same([train(new) for _ in range(3)], expected)
        assert same(dict(new.model.state_dict()), dict(old.model.state_dict()))
        assert same(new.optimizer.state_dict(), old.optimizer.state_dict())  # type: ignore[union-attr]
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def test_optimizer_state_keeps_its_own_dtypes(tmp_path: Path) -> None:
    """torch's load_state_dict alone rounds the fp32 moments of bf16 parameters to bf16: the assertion on it shows why."""
    old, new = run(torch.bfloat16, WideMoments), run(torch.bfloat16, WideMoments, steps=0)
    saved = old.optimizer.state_dict()  # type: ignore[union-attr]
    plain = WideMoments(run(torch.bfloat16, WideMoments, steps=0).model.parameters())
    plain.load_state_dict(saved)
    assert plain.state_dict()["state"][0]["moment"].dtype == torch.bfloat16
    write(old, tmp_path)
    restore_state(read_state(tmp_path, new, 0, 1), new, tmp_path)
    assert same(new.optimizer.state_dict(), saved)  # type: ignore[union-attr]


def test_reading_changes_nothing_until_all_is_read(tmp_path: Path) -> None:
    write(run(), tmp_path)
    (tmp_path / "trainer_state.json").unlink()
    new = run(steps=0)
    before = {name: value.clone() for name, value in new.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"trainer_state\.json is missing from"):
        read_state(tmp_path, new, 0, 1)
    assert same(dict(new.model.state_dict()), before)


def test_an_optimizer_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    write(run(), tmp_path)
    new = run(steps=0)
    fewer = TrainState(model=new.model, optimizer=torch.optim.AdamW(list(new.model.parameters())[:2]))
    read = read_state(tmp_path, fewer, 0, 1)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt in .* does not fit this run's AdamW: .*parameter group"):
        restore_state(read, fewer, tmp_path)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_file_that_would_run_code_is_refused_unread(name: str, tmp_path: Path) -> None:
    state = run()
    write(state, tmp_path)
    torch.save({"state": Harmful(tmp_path / "harm")}, tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} in .* holds more than tensors and plain values: it names posix\.mkdir"):
        read_state(tmp_path, state, 0, 1)
    (tmp_path / name).write_bytes(pickle.dumps({"state": Harmful(tmp_path / "harm")}))
    with pytest.raises(CheckpointError, match=rf"{name} in .* was not written by torch\.save"):
        read_state(tmp_path, state, 0, 1)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("value", [lambda: 1, np.float64(1), Harmful, {"deep": [({"er": Harmful(Path("x"))},)]}])
def test_what_cannot_be_read_back_is_refused_when_it_is_written(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"scheduler\.pt would hold something that cannot be read back"):
        write_plain({"x": value}, tmp_path / "scheduler.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 1, 100, -10])
def test_a_file_that_was_cut_short_is_named(keep: int, tmp_path: Path) -> None:
    write_plain({"x": torch.rand(100)}, tmp_path / "optimizer.pt")
    data = (tmp_path / "optimizer.pt").read_bytes()
    (tmp_path / "optimizer.pt").write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"optimizer\.pt in .* is damaged"):
        read_plain(tmp_path / "optimizer.pt")


def test_json_keeps_every_float_and_those_that_are_not_finite(tmp_path: Path) -> None:
    write_json({"x": 0.1 + 0.2, "inf": float("inf"), "nan": float("nan")}, tmp_path / "trainer_state.json")
    read = read_json(tmp_path / "trainer_state.json")
    assert (read["x"], read["inf"]) == (0.1 + 0.2, float("inf"))
    assert read["nan"] != read["nan"]


def test_json_that_is_damaged_or_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"a": 1')
    with pytest.raises(CheckpointError, match=r"trainer_state\.json in .* is damaged"):
        read_json(tmp_path / "trainer_state.json")
    (tmp_path / "trainer_state.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="holds a JSON list"):
        read_json(tmp_path / "trainer_state.json")


def test_a_tokenizers_files_are_written_beside(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    state = TrainState(model=nn.Linear(2, 2), processing_class=Tokenizer(), with_generators=False)
    assert "tokenizer.json" in write(state, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
