"""Which buckets are full: gradients are counted down, and buckets released strictly in layout order."""

from collections.abc import Collection

from allstep.ddp.layout import BucketLayout

__all__ = ["Countdown"]


class Countdown:
    """What is still missing of one backward.

    Args:
        layout: the buckets.
        parameters: how many are reduced. Those in no bucket are waited for by the last one, whose riders tell of all.
        delayed: parameters of buckets that wait for `trigger` as well.
        trigger: index of a parameter.
    """

    def __init__(
        self, layout: BucketLayout, parameters: int, delayed: Collection[int] = (), trigger: int | None = None
    ) -> None:
        last = len(layout.buckets) - 1
        self._bucket_of = [last] * parameters
        for bucket in layout.buckets:
            for index in bucket.parameters:
                self._bucket_of[index] = bucket.index
        self._sizes = [self._bucket_of.count(bucket.index) for bucket in layout.buckets]
        self._trigger = trigger
        self._first_delayed = min((self._bucket_of[index] for index in delayed), default=last)
        if trigger is not None:
            self._sizes[self._first_delayed] += 1
        self._sizes[last] = self._sizes[last] or 1  # riders without gradients leave at the end of backward
        self._sizes.append(1)  # what comes after the last bucket is never full
        self.restart()

    def restart(self) -> None:
        """Nothing of the coming backward is there yet."""
        self.is_ready = bytearray(len(self._bucket_of))
        """By parameter, 1 where the gradient is final."""
        self._missing = self._sizes.copy()
        self.next = 0
        """First bucket that has not gone out; the number of buckets where all have."""

    def mark(self, index: int) -> bool:
        """A gradient is final; whether the next bucket is full."""
        self.is_ready[index] = 1
        self._missing[self._bucket_of[index]] -= 1
        if index == self._trigger:
            self._missing[self._first_delayed] -= 1
        return not self._missing[self.next]

    def advance(self) -> bool:
        """The next bucket has gone out, whatever it lacks; whether the one behind it is full."""
        self.next += 1
        return not self._missing[self.next]

    def has_gone_out(self, index: int) -> bool:
        """Whether the bucket of a parameter has."""
        return self._bucket_of[index] < self.next

    @property
    def is_done(self) -> bool:
        """Whether all buckets have gone out."""
        return self.next == len(self._missing) - 1
