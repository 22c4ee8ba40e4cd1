"""Label smoothing against transformers' and the formula, for classes, tokens and causal models."""

import pytest
import torch

from allstep.trainer.models.smoothing import smoothed_loss


def batch(shape, ignored=0.0):
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, 7, generator=chance)
    labels = torch.randint(7, shape, generator=chance)
    return logits, torch.where(torch.rand(shape, generator=chance) < ignored, -100, labels)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("shape", "shifted"), [((5,), False), ((3, 6), False), ((3, 6), True)], ids=str)
def test_the_loss_and_its_gradient_are_those_of_transformers(epsilon, shape, shifted):
    theirs = pytest.importorskip("transformers.trainer_pt_utils", reason="compared with transformers")
    logits, labels = batch(shape, ignored=0.3)
    own, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = smoothed_loss({"logits": own}, labels, epsilon, shifted)
    reference = theirs.LabelSmoother(epsilon=epsilon)({"logits": other}, labels, shift_labels=shifted)
    assert loss.shape == ()
    torch.testing.assert_close(loss, reference)
    loss.backward()
    reference.backward()
    torch.testing.assert_close(own.grad, other.grad)


def test_it_is_a_mean_over_the_labels_that_count():
    logits, labels = batch((4, 6), ignored=0.5)
    rows = [smoothed_loss((logits[row : row + 1],), labels[row : row + 1], 0.2, False) for row in range(4)]
    weights = [int((labels[row] != -100).sum()) for row in range(4)]
    mean = sum(loss * weight for loss, weight in zip(rows, weights, strict=True)) / sum(weights)
    torch.testing.assert_close(smoothed_loss((logits,), labels, 0.2, False), mean)
    log_p = logits.log_softmax(-1)
    counts = labels != -100
    expected = -0.8 * log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0] - 0.2 * log_p.mean(-1)
    torch.testing.assert_close(smoothed_loss((logits,), labels, 0.2, False), expected[counts].mean())


def test_low_logits_are_summed_in_full_and_labels_may_have_a_last_dimension_of_one():
    logits, labels = batch((3, 6))
    low = smoothed_loss({"logits": logits.half()}, labels[..., None], 0.1, False)
    assert low.dtype is torch.float32
    torch.testing.assert_close(low, smoothed_loss({"logits": logits}, labels, 0.1, False), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("labels", [torch.zeros(5), torch.zeros(4, dtype=torch.int64)], ids=str)
def test_what_is_no_class_is_refused_in_words(labels):
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0.1 needs labels that are classes: found logits \(5, 7\)"):
        smoothed_loss((torch.zeros(5, 7),), labels, 0.1, False)
