"""How many micro-batches a step has, so that the samples of a step stay the same whatever the number of ranks. Pure."""

from allstep.errors import ArgumentsError

__all__ = ["accumulation_for"]


def accumulation_for(global_batch: int, micro_batch: int, ranks: int, *, of_whom: str = "global_batch_size") -> int:
    """Micro-batches that each of `ranks` runs in one step of `global_batch` samples.

    Args:
        global_batch: samples of one optimizer step, on all ranks.
        micro_batch: samples of one micro-batch.
        ranks: the world size.
        of_whom: what asks for that global batch, for the error.

    Raises:
        ArgumentsError: they do not divide; with the numbers, and what would.
    """
    accumulation, rest = divmod(global_batch, micro_batch * ranks)
    if not rest:
        return accumulation
    choices = [f"per_device_train_batch_size={size}" for size in _nearest(_divisors(global_batch // ranks), micro_batch)]
    if global_batch % ranks:
        choices = []
    if global_batch % micro_batch == 0:
        numbers = _nearest(_divisors(global_batch // micro_batch), ranks)
        choices.append(f"{' or '.join(map(str, numbers))} rank(s)")
    step = micro_batch * ranks
    sizes = [size for size in (global_batch // step * step, (global_batch // step + 1) * step) if size]
    choices.append(f"global_batch_size={' or '.join(map(str, sizes))}")
    raise ArgumentsError(
        f"{of_whom} is {global_batch} samples, which {ranks} rank(s) with micro-batches of {micro_batch} cannot make up: "
        f"{global_batch} / ({ranks} x {micro_batch}) = {global_batch / step:.6g}, expected a whole number of micro-batches on "
        f"each rank. Use {', or '.join(choices)}."
    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _nearest(numbers: list[int], to: int) -> list[int]:
    """At most two of them: the nearest below and above."""
    below = [number for number in numbers if number < to]
    above = [number for number in numbers if number > to]
    return [*below[-1:], *above[:1]]
