"""Float16 runs scale their loss up, so that small gradients are not lost in it, and all ranks by the same factor.

The factor is a power of two, so nothing is rounded: gradients have the bits that they would have without it. Where it was too
large, gradients overflow; then no rank takes the step, and all halve it. See Micikevicius et al., "Mixed Precision Training",
2018, section 3.2. Micro-batches are weighted, so what is scaled is the sum over label tokens or samples, not their mean:
the factor begins at 2**16 divided by the sum of the weights, which is torch's 2**16 for the mean.
"""

import math
from typing import Any

import torch
from torch import nn

from allstep.comm.agreement import any_rank
from allstep.comm.communicator import Communicator
from allstep.errors import ArgumentsError

__all__ = ["AgreedGradScaler", "make_scaler"]

_FIRST = 16
"""Binary logarithm of the scale of a mean loss in the first step: torch's."""


class AgreedGradScaler(torch.amp.GradScaler):
    """torch's scaler for gradients that have been reduced: all ranks find out alike, and keep the same scale.

    Args:
        device: of the gradients.
        communicator: the ranks.
        weight: what the sum of a step's weights is likely to be; the first step tells.
    """

    def __init__(self, device: torch.device, communicator: Communicator, weight: float) -> None:
        super().__init__(device.type, init_scale=_scale_for(weight))
        self._communicator = communicator
        self._is_first = True
        self._factor: float | None = None
        self.scale(torch.zeros((), device=device))  # makes its tensors, which `unscale_` expects

    @property
    def factor(self) -> float:
        """What losses are multiplied by now; read from the device once a step."""
        if self._factor is None:
            self._factor = float(self.get_scale())
        return self._factor

    def unscale_gradients(self, optimizer: torch.optim.Optimizer, weight: float) -> bool:
        """Collective. Divide the reduced gradients by the scale, and adapt it; whether they have overflowed on any rank.

        Args:
            optimizer: whose gradients.
            weight: the sum of the weights of all micro-batches of this step.

        Raises:
            ValueError: a gradient is of float16 itself.
        """
        self.unscale_(optimizer)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        overflowed = bool(any_rank(self._communicator, int(any(float(each) for each in found))))
        for each in found:
            each.fill_(float(overflowed))
        self.update(_scale_for(weight) * (0.5 if overflowed else 1.0) if self._is_first and weight > 0 else None)
        self._is_first, self._factor = False, None
        return overflowed

    def is_used_up(self, weight: float) -> bool:
        """Whether the scale has come down to that of a mean loss that is not scaled at all."""
        return weight > 0 and self.factor * weight < 1.0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        super().load_state_dict(state_dict)
        self._is_first, self._factor = False, None


def make_scaler(
    precision: str, model: nn.Module, device: torch.device, communicator: Communicator, weight: float
) -> AgreedGradScaler | None:
    """The scaler of a run, None where it computes in no float16.

    Args:
        precision: "fp16", "bf16" or "no".
        weight: what the sum of a step's weights is likely to be.

    Raises:
        ArgumentsError: parameters that are of float16 themselves.
    """
    if precision != "fp16":
        return None
    low = [name for name, each in model.named_parameters() if each.requires_grad and each.dtype is torch.float16]
    if low:
        raise ArgumentsError(
            f"fp16=True with a model in float16: expected its parameters in float32, which the optimizer moves; found "
            f"{low[0]!r} and {len(low) - 1} more of float16. Load it with dtype=torch.float32, or call model.float()."
        )
    return AgreedGradScaler(device, communicator, weight)


def _scale_for(weight: float) -> float:
    """The scale of a sum that is torch's first one for the mean; a power of two."""
    return 2.0 ** (_FIRST - round(math.log2(weight))) if weight > 0 else 2.0**_FIRST
