"""The loss of a micro-batch, and what it is worth beside the others of a step.

A model's loss is a mean over something: over label tokens where labels mark some as ignored, else over samples. Averaging such
means over micro-batches and ranks is wrong as soon as they are means over unequal counts. So each micro-batch has a weight,
that count; gradients of weight x loss are summed, and divided by the sum of the weights once, after the reduction.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allstep.data.collate import size_of
from allstep.trainer.models.prepare import bare

__all__ = [
    "LossFacts",
    "accepted_columns",
    "call_model",
    "inner_model",
    "label_names_of",
    "loss_of",
    "shifts_labels",
    "takes_count",
    "weight_of",
]

IGNORED = -100
"""The label that a loss leaves out: `ignore_index` of torch's losses."""
FEW = 256
"""Labels that are counted as numbers, not as a tensor."""
_SPANS = ("start_positions", "end_positions")
"""What models that answer questions call their labels."""
_CAUSAL_LOSS = "ForCausalLMLoss"
"""Name of the function by which transformers' models compare each token with what was said at the one before."""
_SHIFTED = frozenset({"shift_labels", "shift_logits", "shifted_logits"})
"""What a forward that does so itself calls what it compares."""

_IN_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
"""PEFT's kinds of prompts that are no tokens, and change no labels."""


def call_model(model: Callable[..., Any], inputs: Any, **more: Any) -> Any:
    """`model(**inputs)` for a mapping, `model(*inputs)` for a tuple or list, `model(inputs)` else; `more` are keywords."""
    if isinstance(inputs, Mapping):
        return model(**inputs, **more)
    return model(*inputs, **more) if isinstance(inputs, (tuple, list)) else model(inputs, **more)


def loss_of(outputs: Any, model: nn.Module) -> torch.Tensor:
    """The loss in what a model returned: its item or attribute "loss", its first element, or itself if it is one number.

    Raises:
        ValueError: there is no loss in it.
    """
    loss: Any = None
    if isinstance(outputs, torch.Tensor):
        loss = outputs
    elif isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif hasattr(outputs, "loss"):
        loss = outputs.loss
    elif isinstance(outputs, (tuple, list)) and outputs:
        loss = outputs[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{type(outputs).__name__}"
        keys = f" with keys {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
        raise ValueError(
            f"{type(model).__name__} returned no loss: found {found}{keys}; expected a dict or object with 'loss', a tuple "
            f"that begins with it, or the loss itself, as one number. Does the batch hold labels? Or pass compute_loss_func, "
            f"or override Trainer.compute_loss."
        )
    return loss.reshape(())


@dataclass(frozen=True, kw_only=True)
class LossFacts:
    """What is to be known of a model's loss; read once, for it takes longer than a small forward."""

    label_names: Sequence[str]
    """Names of inputs that are labels."""
    shifted: bool = False
    """Whether the first label of every row counts nowhere (see `shifts_labels`)."""
    ignored_pixel: int = IGNORED
    """The label of pixels that a loss leaves out."""
    counted: bool = False
    """Whether forward has a parameter `num_items_in_batch`."""
    own_weight: Callable[[Any], Any] | None = None
    """The user's function, which replaces the count of labels: inputs -> one number, not negative."""

    @classmethod
    def of(cls, model: nn.Module, label_names: Sequence[str] | None, own_weight: Callable[[Any], Any] | None) -> "LossFacts":
        """The facts about `model`; `label_names` None: as its forward calls them."""
        return cls(
            label_names=label_names_of(model, label_names),
            shifted=shifts_labels(model),
            ignored_pixel=getattr(getattr(inner_model(model), "config", None), "semantic_loss_ignore_index", IGNORED),
            counted="num_items_in_batch" in inspect.signature(inner_model(model).forward).parameters,
            own_weight=own_weight,
        )

    def weight(self, inputs: Any) -> int | float:
        """What the mean loss of `inputs` is taken over; 0 where nothing in them counts.

        Raises:
            ValueError: the user's function gave something else than one finite number that is not negative.
        """
        if self.own_weight is not None:
            return _own_weight(self.own_weight, inputs)
        return weight_of(inputs, self.label_names, self.shifted, self.ignored_pixel)


def _own_weight(function: Callable[[Any], Any], inputs: Any) -> int | float:
    given = function(inputs)
    number = given.item() if hasattr(given, "item") and getattr(given, "ndim", None) == 0 else given
    if isinstance(number, (int, float)) and math.isfinite(number) and number >= 0:
        return number + 0  # True is 1
    found = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) and given.ndim else repr(given)
    raise ValueError(
        f"loss_weight_func returned {found} for a micro-batch; expected one finite number that is not negative: how many "
        f"tokens or samples the mean loss of these inputs is taken over, 0 to leave them out."
    )


def weight_of(inputs: Any, label_names: Sequence[str], shifted: bool = False, ignored_pixel: int = IGNORED) -> int:
    """What the mean loss of a micro-batch was taken over: labels that count, token by token or pixel by pixel, else samples.

    With `shifted`, tokens are counted from the second of each row on, or in "shift_labels" where the inputs have them.
    """
    if isinstance(inputs, Mapping):
        if shifted and isinstance(inputs.get("shift_labels"), torch.Tensor):
            return _counted(inputs["shift_labels"])
        named = [inputs.get(name) for name in label_names if name not in _SPANS]  # a span counts, wherever it begins
        labels = [each for each in named if isinstance(each, torch.Tensor) and each.dim() and not each.is_floating_point()]
        tokens = next((each for each in labels if each.dim() > 1), None)  # those of tokens before those of samples
        if tokens is not None:
            return _counted(tokens[..., 1:] if shifted else tokens, IGNORED if tokens.dim() == 2 else ignored_pixel)
        if labels:
            return _counted(labels[0])
    size = size_of(inputs)
    return 1 if size is None else size


def _counted(labels: torch.Tensor, ignored: int = IGNORED) -> int:
    """How many of `labels` are not to be left out."""
    if labels.numel() <= FEW and labels.device.type == "cpu":  # two kernels take longer than counting a short list
        return labels.numel() - labels.flatten().tolist().count(ignored)
    return int((labels != ignored).sum())


def inner_model(model: Any) -> Any:
    """The model whose forward says what it takes: inside torch.compile, data-parallel wrappers and PEFT's adapters."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif bare(model) is not model:
            model = bare(model)
        else:
            return model


def shifts_labels(model: nn.Module) -> bool:
    """Whether `model` compares the labels of a row, from the second on, with what it said one place before.

    Decoders of Hugging Face do so inside their forward, and then the first label of a row counts in no mean; encoder-decoders
    do not. It is read from the names in forward's code, for not all that are called "ForCausalLM" shift (BartForCausalLM),
    and some do that are not (GPT2LMHeadModel). Of other models, those shift whose forward has variables named as most people
    name them, `shift_labels` or `shift_logits`. Where PEFT puts virtual tokens before a row, its first label counts too: the
    last of them says it.
    """
    if _puts_prompts_before_rows(model):
        return False
    inner = inner_model(model)
    code = getattr(inspect.unwrap(getattr(inner.forward, "__func__", inner.forward)), "__code__", None)
    if code is None or getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return False
    own_variables = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :]
    if _SHIFTED.intersection(own_variables):
        return True
    return "loss_function" in code.co_names and getattr(inner.loss_function, "__name__", "") == _CAUSAL_LOSS


def _puts_prompts_before_rows(model: Any) -> bool:
    config = getattr(bare(model), "active_peft_config", None) if hasattr(bare(model), "peft_config") else None
    kind = getattr(getattr(config, "peft_type", None), "value", "")
    return bool(getattr(config, "is_prompt_learning", False)) and kind not in _IN_CACHE


def takes_count(function: Callable[..., Any]) -> bool:
    """Whether `function` can be given `num_items_in_batch`."""
    parameters = inspect.signature(function).parameters
    return "num_items_in_batch" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def label_names_of(model: nn.Module, named: Sequence[str] | None) -> list[str]:
    """Names of inputs that are labels: those given, else those of forward's parameters that speak of labels, else "labels".

    The places where an answer begins and ends are labels too.
    """
    if named is not None:
        return list(named)
    parameters = inspect.signature(inner_model(model).forward).parameters
    return [name for name in parameters if "label" in name or name in _SPANS] or ["labels"]


def accepted_columns(model: nn.Module, label_names: Sequence[str]) -> frozenset[str] | None:
    """Names that the model's forward has, and labels; None where it names nothing and takes anything (`**kwargs`).

    A forward that names its inputs and has `**kwargs` too passes those on to its inner parts: as in Hugging Face's Trainer, a
    column of another name, such as the text that was tokenized, is not for it.
    """
    parameters = inspect.signature(inner_model(model).forward).parameters.values()
    any_kind = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {parameter.name for parameter in parameters if parameter.kind not in any_kind}
    if not named and any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(named | {"label", "label_ids", "labels"} | set(label_names))
