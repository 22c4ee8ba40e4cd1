"""The table of devices: what Linux shows of each kind, and what hides some of it."""

from pathlib import Path

import pytest
import torch

from allstep.comm.process_group import KNOWN_BACKENDS, NATIVE_BACKEND, choose_backend
from allstep.devices import KINDS, kind_here, visible_devices
from allstep.errors import BackendError


def machine(root: Path, *files: str) -> str:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    return str(root)


@pytest.mark.parametrize(
    ("files", "kind", "variables", "visible"),
    [
        ((), "cpu", {}, 0),
        (("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"), "cuda", {}, 2),
        (("dev/davinci0", "dev/davinci7", "dev/davinci_manager"), "npu", {}, 2),
        (("dev/davinci0", "dev/davinci1"), "npu", {"ASCEND_RT_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": ""}, 1),
        (("dev/cambricon_dev0", "dev/cambricon_ctl"), "mlu", {}, 1),
        (("dev/mtgpu.0", "dev/mtgpu.1"), "musa", {"MUSA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_linux_shows_which_devices_there_are_and_a_variable_hides_some(tmp_path, files, kind, variables, visible):
    root = machine(tmp_path, *files)
    assert kind_here(root).name == kind
    assert visible_devices(variables, root) == visible


def test_every_kind_has_a_backend_and_a_name_that_torch_takes():
    for kind in KINDS:
        assert torch.device(kind.name if kind.package == "torch" else "cpu")
        assert NATIVE_BACKEND[kind.name] == kind.backend
        assert kind.backend in KNOWN_BACKENDS
    assert len({kind.backend for kind in KINDS}) == len(KINDS)


def test_a_backend_of_another_package_is_named_with_it():
    with pytest.raises(BackendError, match=r"no imported package registered it \(it comes with torch_npu\)"):
        choose_backend("hccl", "cpu")
