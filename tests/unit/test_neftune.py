"""Noise on embeddings: transformers' values, in training only, and gone afterwards."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from allstep import TrainingArguments
from allstep.errors import ArgumentsError
from allstep.trainer.models.neftune import noisy_embeddings
from allstep.trainer.models.prepare import in_training


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, tokens):
        return self.embed(tokens)


class Adapted(nn.Module):
    """As PEFT wraps a model."""

    def __init__(self, net):
        super().__init__()
        self.base_model, self.peft_config = nn.Module(), {}
        self.base_model.model = net

    def forward(self, tokens):
        return self.base_model.model(tokens)


TOKENS = torch.arange(8).reshape(2, 4)  # 4 x 4: the root is exact, which transformers takes in float32


def test_noise_is_that_of_transformers_and_in_training_only():
    theirs = pytest.importorskip("transformers.integrations.neftune", reason="compared with transformers")
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    twin.embed.neftune_noise_alpha = 5.0
    twin.embed.register_forward_hook(theirs.neftune_post_forward_hook)
    for model in (net, Adapted(net)):
        with noisy_embeddings(model, 5.0):
            torch.manual_seed(3)
            noisy = model(TOKENS)
            torch.manual_seed(3)
            assert torch.equal(noisy, twin(TOKENS))
            assert not torch.equal(noisy, net.embed.weight[TOKENS])
            model.eval()
            assert torch.equal(model(TOKENS), net.embed.weight[TOKENS])
            model.train()
    with noisy_embeddings(net, None):
        assert torch.equal(net(TOKENS), net.embed.weight[TOKENS])


def failing(net, args):
    with in_training(net, args):
        assert net.config.use_cache is False
        assert net.embed._forward_hooks
        raise KeyError


def test_nothing_is_left_behind_an_error_either():
    net = Net()
    net.config = SimpleNamespace(use_cache=True)
    args = TrainingArguments(neftune_noise_alpha=5.0)
    with pytest.raises(KeyError):
        failing(net, args)
    assert net.config.use_cache is True
    assert not net.embed._forward_hooks
    args.use_cache = True
    with in_training(net, args):
        assert net.config.use_cache is True


def test_a_model_without_embeddings_is_refused_in_words():
    with (
        pytest.raises(ArgumentsError, match=r"found Linear without get_input_embeddings\(\)"),
        noisy_embeddings(nn.Linear(2, 2), 5),
    ):
        pass
