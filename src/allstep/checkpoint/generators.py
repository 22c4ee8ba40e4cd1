"""Random number generators of one rank: Python's, NumPy's, torch's, and that of the rank's own device."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["GeneratorStates"]


@dataclass(frozen=True, kw_only=True)
class GeneratorStates:
    """The states of a process' global generators at one moment. They consist of tensors and plain values only."""

    states: Mapping[str, Any]
    """By generator, under the keys that Hugging Face's files have too: python, numpy, cpu, and the device's type."""

    @classmethod
    def capture(cls) -> "GeneratorStates":
        """Read the generators of this process; they stay as they are.

        Of an accelerator only the current device is read, and only where this process already uses it: asking the others
        would make this rank take memory on each of them.
        """
        states = {
            "python": random.getstate(),
            "numpy": _plain(np.random.get_state(legacy=False)),
            "cpu": torch.get_rng_state(),
        }
        device = _device_in_use()
        if device is not None:
            states[device.type] = torch.get_device_module(device).get_rng_state()
        return cls(states=states)

    def restore(self) -> None:
        """Set the generators of this process to these states."""
        random.setstate(self.states["python"])
        np.random.set_state(_numpy(self.states["numpy"]))
        torch.set_rng_state(self.states["cpu"])
        device = _device_in_use()
        if device is not None and device.type in self.states:
            module = torch.get_device_module(device)
            state = self.states[device.type]
            if not isinstance(state, torch.Tensor):  # Hugging Face saves those of all devices of the host, in a list
                state = state[module.current_device()]
            module.set_rng_state(state)


def _device_in_use() -> torch.device | None:
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    is_initialized = getattr(torch.get_device_module(device), "is_initialized", None)
    return device if is_initialized is not None and is_initialized() else None


def _plain(value: Any) -> Any:
    """`value` with NumPy's arrays as tensors and NumPy's numbers as Python's, which a safe loader takes."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value


def _numpy(value: Any) -> Any:
    """`value` with tensors as NumPy arrays of the same kind of numbers."""
    if isinstance(value, Mapping):
        return {key: _numpy(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
