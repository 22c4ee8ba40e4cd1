import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from allstep.checkpoint.reasons import reason, system_error


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refused_behind() -> None:
    try:
        raise full()
    except OSError:
        raise RuntimeError("unexpected pos 640 vs 534")  # noqa: B904 - as torch does it


def test_the_systems_refusal_is_found_behind_other_errors() -> None:
    with pytest.raises(RuntimeError) as raised:
        refused_behind()
    found = system_error(raised.value)
    assert found is not None
    assert found.errno == errno.ENOSPC
    assert reason(raised.value) == "No space left on device"


def test_so_it_is_in_errors_of_the_code_that_writes_tensors(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError) as raised:
        save_file({"weight": torch.zeros(2)}, tmp_path / "nowhere" / "model.safetensors")
    found = system_error(raised.value)
    assert found is not None
    assert (found.errno, reason(raised.value)) == (errno.ENOENT, "No such file or directory")


@pytest.mark.parametrize("error", [TypeError("no such thing.\nat all"), OSError("made up"), SafetensorError("os error")])
def test_other_errors_are_nobodys_refusal_and_are_told_in_a_line(error: Exception) -> None:
    assert system_error(error) is None
    assert reason(error).startswith(type(error).__name__)
    assert "\n" not in reason(error)
    assert reason(TypeError()) == "TypeError"
