import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from allstep.checkpoint.generators import GeneratorStates
from allstep.checkpoint.plain_files import read_plain, write_plain


@pytest.fixture(autouse=True)
def generators_as_before() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draw() -> tuple[object, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


def test_restored_generators_draw_what_they_would_have_drawn(tmp_path: Path) -> None:
    random.gauss(0, 1), np.random.randn()  # both keep the second of a pair of normal numbers: part of their state
    write_plain(dict(GeneratorStates.capture().states), tmp_path / "rng.pth")
    expected = draw()
    assert draw() != expected
    GeneratorStates(states=read_plain(tmp_path / "rng.pth")).restore()
    assert draw() == expected


def test_capturing_draws_nothing() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = draw()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    GeneratorStates.capture()
    assert draw() == expected


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_numpy_may_run_on_another_bit_generator(kind: type, tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(kind(5))
        write_plain(dict(GeneratorStates.capture().states), tmp_path / "rng.pth")
        expected = np.random.rand(3).tolist()
        GeneratorStates(states=read_plain(tmp_path / "rng.pth")).restore()
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_hugging_faces_form_is_understood(tmp_path: Path) -> None:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save(states, tmp_path / "rng_state.pth")
    expected = draw()
    GeneratorStates(states=read_plain(tmp_path / "rng_state.pth", arrays=True)).restore()
    assert draw() == expected


def test_no_accelerator_is_woken_up() -> None:
    captured = GeneratorStates.capture()
    if not torch.cuda.is_initialized():
        assert set(captured.states) == {"python", "numpy", "cpu"}
    assert torch.cuda.is_initialized() == ("cuda" in captured.states)
