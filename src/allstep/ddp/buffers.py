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
        self._parameters = parameters
        self._starts = [0] * len(parameters)  # in elements of the flat tensor
        self._flat_of: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        """Per parameter, its gradient: of the parameter's shape and, where that is dense, its strides."""
        for bucket in layout.buckets:
            flat = self._flat[bucket.dtype, bucket.device][bucket.start : bucket.start + bucket.numel]
            self.buckets.append(flat)
            self.gradients.append(flat[: bucket.gradients])
            for slot in bucket.slots:
                self._starts[slot.parameter] = bucket.start + slot.offset
                self._flat_of[slot.parameter] = flat
                self.renew_view(slot.parameter)
        self.riders = self.buckets[-1][layout.buckets[-1].gradients :]
        """The numbers that travel behind the last bucket's gradients: (riders,), float32."""

        self.note_users()

    def renew_view(self, index: int) -> torch.Tensor:
        """Put another tensor onto the memory of a parameter's gradient, in the place of the one of before.

        It is no view in the eyes of autograd, so that `detach_()` and `share_memory_()` work as on any gradient.
        """
        parameter, flat = self._parameters[index], self._flat_of[index]
        # an optimizer's fused loops need gradient and parameter to have the same strides (channels_last convolutions)
        template = torch.empty_like(parameter, device="meta")  # contiguous, where the parameter's strides are not dense
        view = torch.empty(0, dtype=flat.dtype, device=flat.device)
        view.set_(flat.untyped_storage(), self._starts[index], template.shape, template.stride())
        self.views[index] = view
        return view

    def note_users(self) -> None:
        """All that hold a piece of the flat tensors by now are known."""
        self._users = self._count_users()

    def has_other_users(self) -> bool:
        """Whether somebody else holds a piece of the flat tensors."""
        return self._users != self._count_users()

    def _count_users(self) -> list[int]:
        return [torch._C._storage_Use_Count(flat.untyped_storage()._cdata) for flat in self._flat.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all flat tensors."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())
