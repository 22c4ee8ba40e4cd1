import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from allstep.checkpoint.names import unwrapped
from allstep.checkpoint.weights import copied_weights, read_weights, restore_weights, write_weights
from allstep.errors import CheckpointError


class Tied(nn.Module):
    """An embedding whose weight is the head's too, and a buffer."""

    def __init__(self, *, tied: bool = True, width: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, width)
        self.head = nn.Linear(width, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(2))


class DistributedDataParallel(nn.Module):
    """A wrapper by the name that torch's and allstep's have."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def move(source: nn.Module, target: nn.Module, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    write_weights(source, folder)
    restore_weights(target, read_weights(folder), folder)


def test_tied_tensors_are_written_once_and_come_back_tied(tmp_path: Path) -> None:
    source, target = Tied(), Tied()
    move(source, target, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {"embed.weight", "seen"}
    assert target.head.weight is target.embed.weight
    assert equal(copies(source), copies(target))


def test_weights_of_a_tied_model_fill_an_untied_one_only_if_all_are_there(tmp_path: Path) -> None:
    write_weights(Tied(), tmp_path)
    with pytest.raises(CheckpointError, match=r"The files lack head\.weight\."):
        restore_weights(Tied(tied=False), read_weights(tmp_path), tmp_path)


def test_two_values_for_one_tied_tensor_are_refused(tmp_path: Path) -> None:
    write_weights(Tied(tied=False), tmp_path)
    target = Tied()
    before = copies(target)
    with pytest.raises(CheckpointError, match=r"embed\.weight and head\.weight are one tensor in the model"):
        restore_weights(target, read_weights(tmp_path), tmp_path)
    assert equal(copies(target), before)


def test_names_have_no_prefix_of_a_wrapper_and_both_ways_load(tmp_path: Path) -> None:
    source = Tied()
    move(DistributedDataParallel(source), plain := Tied(), tmp_path / "a")
    assert "embed.weight" in load_file(tmp_path / "a" / "model.safetensors")
    move(source, DistributedDataParallel(wrapped := Tied()), tmp_path / "b")
    assert equal(copies(plain), copies(source))
    assert equal(copies(wrapped), copies(source))


def test_names_have_no_trace_of_compilation(tmp_path: Path) -> None:
    source, target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    source[1] = torch.compile(source[1], backend="eager")  # type: ignore[assignment]
    move(torch.compile(source, backend="eager"), target, tmp_path)  # type: ignore[arg-type]
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(target[1].weight, source[1].weight)


def test_weights_that_somebody_saved_from_inside_a_wrapper_load(tmp_path: Path) -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    save_file(DistributedDataParallel(source).state_dict(), tmp_path / "model.safetensors")
    restore_weights(target, read_weights(tmp_path), tmp_path)
    assert equal(copies(source), copies(target))


def test_a_model_with_a_child_called_module_keeps_its_names(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    source, target = Holder(), Holder()
    assert unwrapped(source) is source
    move(source, target, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {"module.weight", "module.bias"}
    assert equal(copies(source), copies(target))


def test_strides_and_storage_of_the_model_stay_its_own(tmp_path: Path) -> None:
    source, target = nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2)
    for model in (source, target):
        model.weight.data = model.weight.data.to(memory_format=torch.channels_last)
    places = [parameter.data_ptr() for parameter in target.parameters()]
    move(source, target, tmp_path)
    assert target.weight.is_contiguous(memory_format=torch.channels_last)
    assert [parameter.data_ptr() for parameter in target.parameters()] == places
    assert equal(copies(source), copies(target))


def test_views_into_one_storage_are_written_each_for_itself(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def __init__(self, flat: Tensor) -> None:
            super().__init__()
            self.whole, self.part, self.turned = (nn.Parameter(t) for t in (flat, flat[2:4], flat.view(2, 3).t()))

    source, target = Flat(torch.rand(6)), Flat(torch.rand(6))
    move(source, target, tmp_path)
    assert equal(copies(source), copies(target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    def model(value: Tensor) -> nn.Module:
        holder = nn.Module()
        holder.register_buffer("value", value.to(dtype))
        holder.register_buffer("empty", torch.zeros(0, 3, dtype=dtype))
        holder.register_buffer("scalar", torch.tensor(1).to(dtype))
        return holder

    source, target = model(torch.randn(50) * 1e3), model(torch.zeros(50))
    move(source, target, tmp_path)
    assert equal(copies(source), copies(target))
    assert target.get_buffer("value").dtype == dtype


def test_not_a_number_and_negative_zero_come_back_bit_for_bit(tmp_path: Path) -> None:
    source, target = nn.Linear(2, 1), nn.Linear(2, 1)
    source.weight.data = torch.tensor([[float("nan"), -0.0]])
    move(source, target, tmp_path)
    assert target.weight.data.view(torch.int32).tolist() == source.weight.data.view(torch.int32).tolist()


def test_the_first_names_that_differ_are_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    write_weights(nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(9))), tmp_path)
    target = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 2, bias=False))
    before = copies(target)
    with pytest.raises(CheckpointError) as caught:
        restore_weights(target, read_weights(tmp_path), tmp_path)
    text = str(caught.value)
    assert "do not fit this Sequential" in text
    assert "The model has no 2.weight, 3.weight, 4.weight, 5.weight, 6.weight and 2 more, which the files hold." in text
    assert "1.weight has shape (2, 2) in the files, (2, 3) in the model." in text
    assert "The files lack 0.bias." in text
    assert equal(copies(target), before)


def test_another_dtype_is_an_error_and_not_a_silent_cast(tmp_path: Path) -> None:
    write_weights(nn.Linear(2, 2), tmp_path)
    with pytest.raises(CheckpointError, match=r"weight is torch\.float32 in the files, torch\.bfloat16 in the model"):
        restore_weights(nn.Linear(2, 2).bfloat16(), read_weights(tmp_path), tmp_path)


def test_extra_state_that_is_no_tensor_comes_back(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        history: Any = None

        def get_extra_state(self) -> Any:
            return {"history": self.history}

        def set_extra_state(self, state: Any) -> None:
            self.history = state["history"]

    source, target = Scaled(2, 2), Scaled(2, 2)
    source.history = [1.5, torch.ones(2)]
    move(source, target, tmp_path)
    assert target.history[0] == 1.5
    assert torch.equal(target.history[1], torch.ones(2))


class Pretrained(nn.Linear):
    """A model with transformers' `save_pretrained`."""

    def __init__(self, *, shards: bool = False, rename: str = "", adapters_only: bool = False) -> None:
        super().__init__(2, 2)
        self.shards, self.rename, self.adapters_only = shards, rename, adapters_only

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text('{"model_type": "linear"}')
        tensors = {self.rename + name: value for name, value in self.state_dict().items()}
        if self.adapters_only:
            save_file({"lora": torch.ones(1)}, folder / "adapter_model.safetensors")
        elif not self.shards:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "by": "itself"})
        else:
            names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
            for name, (key, value) in zip(names, tensors.items(), strict=True):
                save_file({key: value}, folder / name)
            weight_map = dict(zip(tensors, names, strict=True))
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def written(model: nn.Module, folder: Path) -> set[str]:
    names = write_weights(model, folder)
    assert sorted(names) == sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    target = Pretrained()
    restore_weights(target, read_weights(folder), folder)
    assert equal(copies(model), copies(target))
    return set(names)


def test_a_pretrained_model_writes_its_own_files(tmp_path: Path) -> None:
    assert written(Pretrained(), tmp_path) == {"config.json", "model.safetensors"}
    assert b'"by"' in (tmp_path / "model.safetensors").read_bytes(), "its own file, not one of ours over it"


def test_a_pretrained_model_may_split_its_weights(tmp_path: Path) -> None:
    names = written(Pretrained(shards=True), tmp_path)
    assert "model.safetensors.index.json" in names
    assert "model.safetensors" not in names


@pytest.mark.parametrize("model", [Pretrained(rename="old."), Pretrained(rename="old.", shards=True)])
def test_where_a_pretrained_model_writes_other_names_ours_are_written(model: nn.Module, tmp_path: Path) -> None:
    assert written(model, tmp_path) == {"config.json", "model.safetensors"}


def test_where_a_pretrained_model_writes_adapters_only_the_rest_is_written_too(tmp_path: Path) -> None:
    names = written(Pretrained(adapters_only=True), tmp_path)
    assert names == {"config.json", "adapter_model.safetensors", "model.safetensors"}


def test_a_copy_is_written_as_the_weights_were(tmp_path: Path) -> None:
    """Tied tensors once, and views of one storage each for itself, as without the copy."""
    source = Tied()
    source.part = nn.Parameter(source.embed.weight.data[1:2])
    source.turned = nn.Parameter(source.embed.weight.data.t())
    (tmp_path / "live").mkdir()
    write_weights(source, tmp_path / "live")
    write = copied_weights(source)
    for value in source.state_dict().values():
        value.zero_()
    (tmp_path / "copied").mkdir()
    assert write(tmp_path / "copied") == ["model.safetensors"]
    assert (tmp_path / "copied" / "model.safetensors").read_bytes() == (tmp_path / "live" / "model.safetensors").read_bytes()


def test_no_weights_damaged_weights_and_pickled_weights_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors\.$"):
        read_weights(tmp_path)
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickled file, which allstep does not read"):
        read_weights(tmp_path)
    write_weights(nn.Linear(2, 2), tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors in .* is damaged"):
        read_weights(tmp_path)


def test_a_damaged_index_or_a_missing_part_is_named(tmp_path: Path) -> None:
    written(Pretrained(shards=True), tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json in .* cannot be read"):
        read_weights(tmp_path)
