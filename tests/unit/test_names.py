"""Names of tensors: without what wrappers add when written, and with it, where it is clear what is meant, when read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from allstep import DistributedDataParallel
from allstep.checkpoint.names import clean_names, unwrapped, without_prefixes
from allstep.checkpoint.weights import read_weights, restore_weights, write_weights
from allstep.errors import CheckpointError

NAMES = ["0.weight", "0.bias", "1.module.weight", "1.module.bias"]


class Holder(nn.Module):
    """A user's own module that holds another as `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), Holder())


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def parallel(module: nn.Module) -> nn.Module:
    """torch's other wrapper, which needs no group."""
    return nn.DataParallel(module)


def inside(module: nn.Module) -> nn.Module:
    """Wrapped in its parts, as people do who compile or distribute them one by one."""
    module[0] = parallel(compiled(module[0]))  # type: ignore[operator, index]
    module[1].module = compiled(parallel(module[1].module))  # type: ignore[operator, index, union-attr]
    return module


WRAPPED = {
    "not": lambda module: module,
    "compiled": compiled,
    "DataParallel": parallel,
    "allstep": DistributedDataParallel,
    "compiled in a wrapper": lambda module: parallel(compiled(module)),
    "a wrapper, compiled": lambda module: compiled(DistributedDataParallel(module)),
    "thrice": lambda module: parallel(compiled(parallel(module))),
    "in its parts": inside,
    "in its parts and as a whole": lambda module: compiled(DistributedDataParallel(inside(module))),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_the_names_that_are_written_are_those_of_the_users_model(how: str, tmp_path: Path) -> None:
    source = WRAPPED[how](model())
    write_weights(source, tmp_path)
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(NAMES)
    target = model()
    assert restore_weights(target, read_weights(tmp_path), tmp_path) is None
    values = list(target.state_dict().values())
    assert all(torch.equal(value, own) for value, own in zip(source.state_dict().values(), values, strict=True))
    restore_weights(WRAPPED[how](model()), read_weights(tmp_path), tmp_path)


@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize("into", ["not", "in its parts", "a wrapper, compiled"])
def test_the_names_that_a_wrappers_own_state_dict_has_are_understood(how: str, into: str, tmp_path: Path) -> None:
    source, target = WRAPPED[how](model()), WRAPPED[into](model())
    saved = source.state_dict()
    save_file(saved, tmp_path / "model.safetensors")
    line = restore_weights(target, read_weights(tmp_path), tmp_path)
    assert all(torch.equal(value, own) for value, own in zip(saved.values(), target.state_dict().values(), strict=True))
    assert (line is None) == (list(saved) == NAMES)
    if how == "thrice":
        assert line == (
            f"the weights in {tmp_path} have names with _orig_mod. and module., as wrappers write them; they were read without"
        )


def test_a_wrapper_of_a_name_of_its_own_is_one_too() -> None:
    class Mine(nn.DataParallel):
        pass

    inner = nn.Linear(2, 2)
    assert unwrapped(Mine(inner)) is inner
    assert unwrapped(Holder()).__class__ is Holder
    assert clean_names(Holder(), ["module.weight"]) == {"module.weight": "module.weight"}


def test_where_it_is_not_clear_which_tensor_is_meant_names_stay_as_they_are(tmp_path: Path) -> None:
    for values, own in (
        ({"module.weight": 1, "weight": 2}, ["weight"]),
        ({"_orig_mod.weight": 1}, ["weight", "module.weight"]),
        ({"module.bias": 1}, ["weight"]),
    ):
        assert without_prefixes(values, own) == (values, "")
    assert without_prefixes({"_forward_module.weight": 1}, ["weight"]) == ({"weight": 1}, "_forward_module.")
    save_file({"module.weight": torch.ones(2, 2), "weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"The model has no module\.weight, which the files hold"):
        restore_weights(nn.Linear(2, 2, bias=False), read_weights(tmp_path), tmp_path)
