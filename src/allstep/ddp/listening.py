"""Hooks on parameters: how a reducer hears of gradients."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["GradientHooks"]


class GradientHooks:
    """Calls `hear(owner, index)` whenever a backward has left a gradient in one of `parameters`.

    The owner is known weakly, or parameters would keep it alive and at work when its wrapper is long gone
    (test_wrapping_again.py).
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], owner: "weakref.ref[Any]", hear: Callable[..., None]) -> None:
        self._nodes: list[Any] = []  # where gradients of parameters are accumulated
        self._hooks: list[Any] = []
        self._hooks_of: list[Any] = []  # by parameter, id -> hook, others' too
        self._counts: list[int] = []
        for index, parameter in enumerate(parameters):
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # one that is frozen now may be thawed later
            self._nodes.append(torch.autograd.graph.get_gradient_edge(parameter).node)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_hook(owner, hear, index)))
            self._hooks_of.append(parameter._post_accumulate_grad_hooks)
            parameter.requires_grad_(trained)

    def be_last(self) -> None:
        """Other hooks on gradients run before these, whenever they are registered, as under torch's class."""
        counts = [*map(len, self._hooks_of)]
        if counts != self._counts:
            for hook, others in zip(self._hooks, self._hooks_of, strict=True):
                if len(others) > 1:
                    others[hook.id] = others.pop(hook.id)
            self._counts = counts

    def backward_leaves_gradients(self, others: Iterable[torch.Tensor]) -> bool:
        """Whether the backward that runs will leave one in any of the parameters, or of `others`.

        `torch.autograd.grad`, as for a gradient penalty, leaves none.
        """
        nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in others]
        try:
            return any(map(torch._C._will_engine_execute_node, (*self._nodes, *nodes)))
        except RuntimeError:  # what it says where autograd.grad was asked for a parameter
            return False

    def remove(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()


def _hook(owner: "weakref.ref[Any]", hear: Callable[..., None], index: int) -> Callable[[torch.Tensor], None]:
    """Written out, as it is called for each gradient: a `partial` of a `partial` takes half as long again."""

    def heard(_: torch.Tensor) -> None:
        living = owner()
        if living is not None:
            hear(living, index)

    return heard
