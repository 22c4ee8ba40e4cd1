"""Flat gradient storage, and the views onto it that become the parameters' gradients."""

from collections.abc import Callable, Sequence

import torch

from allstep.ddp.layout import BucketLayout

__all__ = ["GradientStorage"]


class GradientStorage:
    """One flat tensor for each dtype and device of a layout; buckets and gradients are views onto them.

    Args:
        layout: where everything lies.
        parameters: the trainable parameters, in registration order.
        allocate: `allocate(numel, dtype, device)` gives flat zeroed memory.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[torch.Tensor],
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor],
    ) -> None:
        self.layout = layout
        self._flat = {
            (dtype, device): allocate(numel, getattr(torch, dtype), torch.device(device))
            for (dtype, device), numel in layout.storage_sizes().items()
        }
        self.buckets: list[torch.Tensor] = []
        """Per bucket, all that its collective reduces: (numel,)."""
        self.gradients: list[torch.Tensor] = []
        """Per bucket, its gradients without the riders: (gradients,)."""
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        """Per parameter, its gradient: a view of the parameter's shape and, where that is dense, its strides."""
        for bucket in layout.buckets:
            flat = self._flat[bucket.dtype, bucket.device][bucket.start : bucket.start + bucket.numel]
            self.buckets.append(flat)
            self.gradients.append(flat[: bucket.gradients])
            for slot in bucket.slots:
                piece = flat[slot.offset : slot.offset + slot.numel]
                self.views[slot.parameter] = _view_like(piece, parameters[slot.parameter])
        self.riders = self.buckets[-1][layout.buckets[-1].gradients :]
        """The numbers that travel behind the last bucket's gradients: (riders,), float32."""

    @property
    def nbytes(self) -> int:
        """Bytes of all flat tensors."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())


def _view_like(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`piece` (numel,) in the shape of `parameter`, with its strides where they fill memory without gap or overlap.

    An optimizer's fused loops need gradient and parameter to have the same strides (channels_last convolutions).
    """
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():  # true of dense strides only
        return piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
    return piece.view(parameter.shape)
