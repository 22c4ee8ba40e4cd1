"""The work that `allstep bench ddp` gives to the ranks, and how it compares gradients."""

import pytest
import torch

from allstep.cli.bench.programs.ddp import TOLERANCE, TORCH_SETTINGS, Side, _gradient_error
from allstep.cli.bench.programs.models import MODELS, batches, loss_of

MILLIONS = {"mlp32": 8.4, "mlp128": 8.4, "small": 0.83, "gpt": 10.8, "resnet": 0.27, "encoder": 10.6}


@pytest.fixture(autouse=True)
def one_thread():
    """As in the ranks; more would wait for one another 200 times a step."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_each_model_is_of_the_size_that_is_told_and_trains_all_its_parameters(name):
    torch.manual_seed(0)
    model = MODELS[name].build()
    assert sum(one.numel() for one in model.parameters()) / 1e6 == pytest.approx(MILLIONS[name], rel=0.03)
    inputs, target = batches(name, rank=0, count=1)[0]
    loss = loss_of(model(inputs), target)
    loss.backward()
    assert loss.isfinite()
    gradients = {key: one.grad for key, one in model.named_parameters()}
    assert not [key for key, gradient in gradients.items() if gradient is None]
    # no denormals, which are slow: the largest element of each gradient is an ordinary number
    assert min(float(gradient.abs().max()) for key, gradient in gradients.items() if not key.endswith("bias")) > 1e-12


def test_ranks_get_batches_of_their_own_and_always_the_same():
    first, again, other = (batches("small", rank)[0][0] for rank in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_default_of_torch_is_among_its_settings():
    assert TORCH_SETTINGS["torch copies 25 MB"] == {
        "gradient_as_bucket_view": False
    }  # a cap that is given drops the small first bucket
    assert len(TORCH_SETTINGS) == 6


def side(wrap=lambda module: module):
    return Side("small", "sgd", 1, wrap)


def test_equal_gradients_have_no_error_though_weights_went_apart():
    data = list(batches("small", 0))
    ours, theirs = side(), side()
    ours.step(data)
    theirs.taken = ours.taken
    assert _gradient_error(ours, theirs, data)[0] == 0.0


def test_a_gradient_that_is_off_is_found_and_named():
    def off(module):
        module[7].weight.register_hook(lambda gradient: gradient * 1.01)
        return module

    error, name = _gradient_error(side(off), side(), list(batches("small", 0)))
    assert name == "7.weight"
    assert TOLERANCE < error <= 0.01


def test_accumulation_takes_the_mean_over_micro_batches():
    data = list(batches("small", 0))
    several, one = Side("small", "sgd", 4, lambda module: module), side()
    several.gradients(data)
    one.optimizer.zero_grad()
    for inputs, target in data:
        (loss_of(one.wrapped(inputs), target) / 4).backward()
    for mine, other in zip(several.module.parameters(), one.module.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
