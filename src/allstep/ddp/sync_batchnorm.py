"""Batch normalisation over the samples of all ranks, on any device, with unequal numbers of samples.

Each rank gives three numbers a channel (count, mean, sum of squared deviations), which come to all ranks by one all-reduce, as
rows of a matrix in which every rank fills its own. They are combined in rank order by the rule of Chan, Golub and LeVeque,
"Updating formulae and a pairwise algorithm for computing sample variances", 1979. It does not cancel as a sum of squares does.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from allstep.comm.communicator import Communicator, communicator_for

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """As `torch.nn.SyncBatchNorm`, and on the CPU too: mean and variance are those of the whole batch on all ranks.

    Input is (samples, channels, ...), of any floating dtype; statistics are computed in float32, or float64 for such input. All
    ranks must call it alike; a rank may bring no sample. In eval mode, and in a world of one, it is plain batch normalisation.
    `process_group` names the ranks; None is the default group.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm takes (samples, channels, ...), at least two dimensions; got {tuple(input.shape)}."
            )
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm has {self.num_features} channels; got an input of {input.shape[1]}: {tuple(input.shape)}."
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` (samples, channels, ...); the result has its shape and dtype.

        Raises:
            ValueError: a shape that does not fit, or one value a channel on all ranks together, which has no variance.
        """
        self._check_input_dim(input)
        communicator = communicator_for(self.process_group)
        if not self.training or communicator.size == 1:
            return self._local(input)
        momentum = self._count_batch()
        output, mean, squares, count = _Normalise.apply(input, self.weight, self.bias, self.eps, communicator)
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                unbiased = squares / (count - 1)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return output  # type: ignore[no-any-return]

    def _count_batch(self) -> float:
        """The share of this batch in the running statistics; without a momentum, each batch weighs the same."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum or 0.0

    def _local(self, input: Tensor) -> Tensor:
        batch_statistics = self.training or self.running_mean is None
        momentum = self._count_batch() if self.training and self.track_running_stats else 0.0
        running = not self.training or self.track_running_stats
        return functional.batch_norm(
            input,
            self.running_mean if running else None,
            self.running_var if running else None,
            self.weight,
            self.bias,
            batch_statistics,
            momentum,
            self.eps,
        )

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """`module` with every BatchNorm layer in it, torch's SyncBatchNorm too, made one of this class; state is shared."""
        converted = module
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, cls):
            converted = cls(
                module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, process_group
            )
            if module.affine:
                converted.weight, converted.bias = module.weight, module.bias
            converted.running_mean, converted.running_var = module.running_mean, module.running_var
            converted.num_batches_tracked = module.num_batches_tracked
            converted.training = module.training
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return converted


class _Normalise(torch.autograd.Function):
    """(output, mean, sum of squared deviations, count), all but the output over all ranks and not differentiable.

    With x' = (x - mean) / std, and means over the N values of a channel on all ranks, the gradient of the input is
    weight / std * (dy - mean(dy) - x' * mean(dy * x')): Ioffe and Szegedy, "Batch normalization", 2015, section 3.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, communicator: Communicator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        precise = torch.float64 if input.dtype is torch.float64 else torch.float32
        x, shape = input.to(precise), (1, -1, *([1] * (input.dim() - 2)))
        mean, squares, count = _statistics(x, communicator)
        if float(count) <= 1:
            raise ValueError(
                f"SyncBatchNorm needs more than one value a channel on all ranks together in training; got {float(count):g} "
                f"for an input of {tuple(input.shape)} on rank {communicator.rank}."
            )
        deviation = torch.sqrt(squares / count + eps)
        normal = (x - mean.view(shape)) / deviation.view(shape)
        output = normal if weight is None else normal * weight.to(precise).view(shape)
        output = output if bias is None else output + bias.to(precise).view(shape)
        ctx.save_for_backward(normal, deviation, count, weight)
        ctx.communicator = communicator
        ctx.mark_non_differentiable(mean, squares, count)
        return output.to(input.dtype), mean, squares, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        normal, deviation, count, weight = ctx.saved_tensors
        dy, shape = gradient.to(normal.dtype), (1, -1, *([1] * (gradient.dim() - 2)))
        own_axes = [axis for axis in range(dy.dim()) if axis != 1]
        sums = torch.stack((dy.sum(own_axes), (dy * normal).sum(own_axes)))  # (2, channels), of this rank
        total = sums.clone()
        ctx.communicator.all_reduce(total).wait()
        centred = dy - (total[0] / count).view(shape) - normal * (total[1] / count).view(shape)
        scale = deviation.reciprocal() if weight is None else weight.to(dy.dtype) / deviation
        # weight and bias get this rank's part, as every other parameter does; the wrapper reduces it
        own_weight = None if weight is None else sums[1].to(weight.dtype)
        own_bias = None if weight is None else sums[0].to(weight.dtype)
        return (centred * scale.view(shape)).to(gradient.dtype), own_weight, own_bias, None, None


def _statistics(x: Tensor, communicator: Communicator) -> tuple[Tensor, Tensor, Tensor]:
    """Over all ranks: means (channels,), sums of squared deviations (channels,), count ()."""
    axes, channels = [axis for axis in range(x.dim()) if axis != 1], x.shape[1]
    count = x.numel() // channels if channels else 0
    rows = x.new_zeros(communicator.size, 2 * channels + 1)
    if count:
        variance, mean = torch.var_mean(x, axes, correction=0)
        rows[communicator.rank] = torch.cat((mean, variance * count, x.new_tensor([float(count)])))
    communicator.all_reduce(rows).wait()
    means, squares, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1]  # (ranks, channels) twice, (ranks,)
    total = counts.sum()
    mean = (means * counts[:, None]).sum(0) / total
    between = ((means - mean) ** 2 * counts[:, None]).sum(0)
    return mean, squares.sum(0) + between, total
