"""The gradients that parameters hold, and their places in flat storage: in before the collectives, out after them."""

import operator
import sys
from collections.abc import Collection, Sequence
from itertools import repeat

import torch

from allstep.ddp.buffers import GradientStorage
from allstep.ddp.layout import Bucket
from allstep.ddp.second_order import refusing_derivatives
from allstep.ddp.tree import GradientTree

__all__ = ["Gradients"]

_ADDRESS = torch.Tensor.data_ptr
_GRAD = operator.attrgetter("grad")


class Gradients:
    """Moves `.grad` of `parameters` into `storage` and back.

    Args:
        parameters: all that are reduced, in registration order.
        as_views: leave gradients as views of the storage; otherwise copy them back into tensors of their own.
        sparse: indices of parameters whose gradients have no place in storage.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, as_views: bool, sparse: Collection[int] = ()) -> None:
        self.parameters = list(parameters)
        self.sparse = frozenset(sparse)
        self.as_views = as_views
        self._storage: GradientStorage | None = None
        self._kept: dict[int, torch.Tensor] = {}  # gradients left from before, of parameters this rank did not use
        self._aside: tuple[list[torch.Tensor | None], GradientTree] | None = None
        self.tree = GradientTree(self.parameters, self.sparse)
        """What the micro-batches of a window have given, where it is summed in order."""
        self.taken: list[int] = []
        """Parameters whose gradient came in this backward and was gone when their bucket was filled."""
        self._remember_places()

    def _remember_places(self) -> None:
        self._addresses = [*map(_ADDRESS, self.parameters)]
        self._dtypes = [(p.dtype, p.device, p.shape, p.stride()) for p in self.parameters]

    @property
    def storage(self) -> GradientStorage:
        """Where they go."""
        assert self._storage is not None
        return self._storage

    @storage.setter
    def storage(self, storage: GradientStorage) -> None:
        """Gradients that lie in the storage of before move into the new one."""
        before, self._storage = self._storage, storage
        buckets = storage.layout.buckets
        self._parameters_of = [[self.parameters[index] for index in bucket.parameters] for bucket in buckets]
        self._views_of = [[storage.views[index] for index in bucket.parameters] for bucket in buckets]
        self._view_addresses = [*map(_ADDRESS, storage.views)]
        self._references = max(map(sys.getrefcount, storage.views), default=0)  # of each one that is nobody's gradient
        if before is not None:
            for parameter, old, view in zip(self.parameters, before.views, storage.views, strict=True):
                if parameter.grad is old:
                    parameter.grad = view.copy_(old)

    def are_in_storage(self) -> bool:
        """Whether some parameter's gradient lies in it."""
        return self._storage is not None and any(map(operator.is_, map(_GRAD, self.parameters), self._storage.views))

    def drop_storage(self) -> None:
        """Let go of it, before another one is given."""
        self._storage, self._parameters_of, self._views_of = None, [], []

    def fit(self) -> bool:
        """Whether parameters still have the dtypes, devices and strides that they were laid out for."""
        if self._addresses != [*map(_ADDRESS, self.parameters)]:
            before = self._dtypes
            self._remember_places()
            return before == self._dtypes
        return True

    def let_others_keep(self) -> bool:
        """Before gradients come: those of before that somebody else still holds keep their values, in memory of their own.

        So `[p.grad for p in model.parameters()]` is what it was after the next backward too. False where somebody holds other
        pieces of the storage, which has to be left to them as a whole.
        """
        if not self.as_views:
            return True
        if max(map(sys.getrefcount, self.storage.views), default=0) > self._references:
            for bucket, views in zip(self.storage.layout.buckets, self._views_of, strict=True):
                for at, index in enumerate(bucket.parameters):
                    # one more reference is the argument's own
                    if sys.getrefcount(views[at]) > self._references and self.parameters[index].grad is not views[at]:
                        views[at].data = views[at].clone()
                        views[at] = self.storage.renew_view(index)
        return not self.storage.has_other_users()

    def collect(
        self, bucket: Bucket, touched: bytearray, ready: bytearray, unreached: Collection[int]
    ) -> tuple[Sequence[int], list[torch.Tensor], list[torch.Tensor]]:
        """The gradients of a bucket that have to be copied into storage: parameters, places and gradients.

        What is not there counts as zeros. With `as_views` each place is the parameter's gradient from now on.

        Args:
            touched: by parameter, 1 where this backward, or the window that it ends, has made the gradient; cleared of one
                that the loop has taken away between backwards.
            ready: by parameter, 1 where this backward has, or where none is expected.
            unreached: those of which none is expected.
        """
        if 0 in touched:
            self._keep(bucket, touched)
        parameters, views = self._parameters_of[bucket.index], self._views_of[bucket.index]
        gradients: list[torch.Tensor] = [*map(_GRAD, parameters)]
        if any(map(operator.is_, gradients, views)) or any(map(operator.is_, gradients, repeat(None))):
            return self._collect_one_by_one(bucket, touched, ready, unreached)
        if self.as_views:
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view
        return bucket.parameters, views, gradients

    def copy_in(self, bucket: Bucket, views: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Copy gradients of a bucket to their places.

        Raises:
            RuntimeError: a gradient is sparse, of a parameter that was not known to have such.
        """
        if views:
            try:
                torch._foreach_copy_(views, gradients)
            except RuntimeError:
                if all(gradient.layout is torch.strided for gradient in gradients):
                    raise
                raise self._sparse_error(bucket, views, gradients) from None

    def _collect_one_by_one(
        self, bucket: Bucket, touched: bytearray, ready: bytearray, unreached: Collection[int]
    ) -> tuple[Sequence[int], list[torch.Tensor], list[torch.Tensor]]:
        """Where some lie in storage already, or are not there: the others, and their places."""
        indices, places, fresh = [], [], []
        views = self._views_of[bucket.index]
        for at, (index, parameter) in enumerate(zip(bucket.parameters, self._parameters_of[bucket.index], strict=True)):
            gradient, view = parameter.grad, views[at]
            if gradient is None:
                view.zero_()
                if touched[index] and ready[index] and index not in unreached:
                    self.taken.append(index)
                else:
                    touched[index] = 0
                continue
            if gradient is view:
                if view.data_ptr() == self._view_addresses[index]:
                    continue
                views[at] = view = self.storage.renew_view(index)  # somebody gave it other memory: `.data = ` does
            indices.append(index)
            places.append(view)
            fresh.append(gradient)
            if self.as_views:
                parameter.grad = view
        return indices, places, fresh

    def _keep(self, bucket: Bucket, touched: bytearray) -> None:
        for index in bucket.parameters:
            gradient, view = self.parameters[index].grad, self.storage.views[index]
            if not touched[index] and gradient is not None:
                self._kept[index] = view.clone() if gradient is view else gradient

    def _sparse_error(self, bucket: Bucket, views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> RuntimeError:
        """Also takes those gradients away, so that a rank can still say to the others that it failed."""
        places = {id(view) for view, gradient in zip(views, gradients, strict=True) if gradient.layout is not torch.strided}
        slots = [slot for slot in bucket.slots if id(self.storage.views[slot.parameter]) in places]
        for slot in slots:
            self.parameters[slot.parameter].grad = None
        return RuntimeError(
            f"The gradient of {', '.join(repr(slot.name) for slot in slots)} is sparse, but it belongs to no Embedding or "
            f"EmbeddingBag with sparse=True, by which it would have been known. Use one of these, or sparse=False."
        )

    def hand_out(self, untouched: Sequence[int], untouched_anywhere: Collection[int]) -> None:
        """Give each parameter what storage holds for it, the mean; of one that no rank used, leave what was there before.

        Args:
            untouched: parameters that this rank did not use.
            untouched_anywhere: those of them that no other rank used either.
        """
        if self.as_views and not untouched:
            return  # filling the buckets has made every gradient a view
        for index in untouched_anywhere:
            if index in self._kept:
                self.storage.views[index].copy_(self._kept[index])
        own, reduced = [], []
        for index, (parameter, view) in enumerate(zip(self.parameters, self.storage.views, strict=True)):
            if index in untouched_anywhere or parameter.grad is view or index in self.sparse:
                continue
            if self.as_views:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.clone()
            else:
                own.append(parameter.grad.detach())
                reduced.append(view)
        if own:
            torch._foreach_copy_(own, reduced)

    def refuse_derivatives(self) -> None:
        """After a backward with create_graph=True: these are means by now, and cannot be differentiated."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = refusing_derivatives(parameter.grad, parameter)

    def drop(self, touched: bytearray) -> None:
        """Of an abandoned backward nothing may be left for the next one to add to (test_reports_failures.py)."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self.storage.views, strict=True)):
            if parameter.grad is not None and touched[index]:
                parameter.grad.zero_()
            elif index in self._kept and parameter.grad is view:
                view.copy_(self._kept[index])

    def forget(self) -> None:
        """A reduction has ended: what was kept for it is needed no more."""
        self._kept, self.taken = {}, []
        self.tree.clear()

    def set_aside(self) -> bool:
        """Take all gradients from the parameters until `bring_back`; False where that was done before."""
        is_first = self._aside is None
        if is_first:
            pairs = zip(self.parameters, self.storage.views, strict=True)
            self._aside = [p.grad.clone() if p.grad is view else p.grad for p, view in pairs], self.tree
            self.tree = GradientTree(self.parameters, self.sparse)
        for parameter in self.parameters:
            parameter.grad = None
        return is_first

    def bring_back(self) -> bool:
        """Give the parameters the gradients that were set aside; False where there are none."""
        aside, self._aside = self._aside, None
        if aside is None:
            return False
        gradients, self.tree = aside
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return True
