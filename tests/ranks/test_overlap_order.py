"""Communication overlaps backward: on a transport that takes its time, buckets leave before the last gradient is computed."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from allstep import DistributedDataParallel
from allstep.comm.communicator import Communicator, Pending


class SlowTransport(Communicator):
    """Two ranks that hold the same gradients; a reduction ends only when the test lets it."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.events: list[str] = []
        self.may_end = threading.Event()

    def all_reduce(self, tensor: torch.Tensor, *, average: bool = False) -> Pending:
        self.events.append(f"launch {sum(event.startswith('launch') for event in self.events)}")
        number, transport = self.events[-1].split()[1], self

        class Transfer:
            def wait(self) -> None:
                assert transport.may_end.wait(30)
                tensor.mul_(2.0)
                transport.events.append(f"arrived {number}")

        return Transfer()

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        pass

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value]

    def barrier(self) -> None:
        pass


def noted(transport: SlowTransport, name: str):
    return lambda gradient: transport.events.append(f"backward {name}")


def run(order_of_use: list[int]) -> tuple[list[str], nn.Module]:
    transport = SlowTransport()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in order_of_use:
                x = self.layers[index](x)
                x.register_hook(noted(transport, str(index)))  # the gradient that reaches this layer
            return x

    model = DistributedDataParallel(Model(), process_group=transport, bucket_cap_mb=0.0001)
    transport.events.clear()
    loss = model(torch.randn(3, 8)).square().mean()
    # the transport lets go only when the whole backward has been computed: nothing may wait for it before
    first = layers[order_of_use[0]]
    first.weight.register_hook(lambda gradient: transport.may_end.set())
    loss.backward()
    return transport.events, model


def test_buckets_launch_while_backward_still_runs():
    events, model = run([0, 1, 2, 3])
    launches = [event for event in events if event.startswith("launch")]
    assert len(launches) == len(model.bucket_layout.buckets) >= 4
    assert events.index("launch 0") < events.index("backward 2")
    assert events.index("launch 2") < events.index("backward 0")
    assert all(events.index("backward 0") < events.index(event) for event in events if event.startswith("arrived"))


def test_buckets_launch_in_layout_order_whatever_the_order_in_which_they_fill():
    events, _ = run([3, 2, 1, 0])  # layer 0 is used last, so its gradient comes first, and its bucket is the last
    launches = [event for event in events if event.startswith("launch")]
    assert launches == [f"launch {number}" for number in range(len(launches))]
    assert events.index("launch 0") > events.index("backward 3")


def test_gradients_are_the_mean():
    _, model = run([0, 1, 2, 3])
    reduced = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(0)
    alone = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    alone(torch.randn(3, 8)).square().mean().backward()
    for ours, reference in zip(reduced, alone.parameters(), strict=True):
        assert torch.equal(ours, reference.grad)
