"""The name of an optimizer in, its class and settings out: torch's own, and those of libraries that have to be installed.

Names, and what each optimizer is given, are those of Hugging Face's TrainingArguments.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError

__all__ = ["OPTIMIZER_KINDS", "find_optimizer_class"]

_Settings = dict[str, Any]


def find_optimizer_class(args: TrainingArguments, *, can_fuse: bool) -> tuple[Any, _Settings]:
    """The class that `args.optim` names, and its keyword arguments, with those of `args.optim_args`.

    Args:
        can_fuse: whether torch has fused kernels for all parameters.

    Raises:
        ArgumentsError: no optimizer of that name, its package is not installed, or `optim_args` does not fit it.
    """
    kind = OPTIMIZER_KINDS.get(args.optim)
    if kind is None:
        raise ArgumentsError(
            f"optim={args.optim!r}: expected one of {', '.join(OPTIMIZER_KINDS)}. For another, pass "
            f"Trainer(optimizers=(optimizer, None))."
        )
    settings: _Settings = {"lr": args.learning_rate}
    if kind.is_adam:
        settings |= {"betas": (float(args.adam_beta1), float(args.adam_beta2)), "eps": args.adam_epsilon}
    if args.optim == "adamw_torch_fused" and can_fuse:
        settings["fused"] = True
    settings |= kind.more(args) | _read_options(args.optim, args.optim_args, kind)
    if "beta3" in settings:  # of AdEMAMix, which takes them as one
        settings["betas"] = tuple(settings.pop(f"beta{number}") for number in (1, 2, 3))
    return _loaded(args.optim, kind), settings


# ---- what there is


def _nothing(args: TrainingArguments) -> _Settings:
    return {}


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError(f"invalid literal for bool: {text!r}")
    return text.lower() in ("true", "1", "yes")


class _Kind(NamedTuple):
    """An optimizer: where its class is, and what it takes."""

    module: str
    name: str
    package: str = "torch"
    """What has to be installed."""
    is_adam: bool = False
    """Whether it has `betas` and `eps`."""
    more: Callable[[TrainingArguments], _Settings] = _nothing
    """What it is given beside these and the rate."""
    options: Mapping[str, Callable[[str], Any]] = {}
    """What `optim_args` may set, and how its text is read."""


def _bits(bits: int, paged: bool | None = None) -> Callable[[TrainingArguments], _Settings]:
    more: _Settings = {"optim_bits": bits} if paged is None else {"optim_bits": bits, "is_paged": paged}
    return lambda args: dict(more)


def _bnb(name: str, more: Callable[[TrainingArguments], _Settings], **others: Any) -> _Kind:
    return _Kind("bitsandbytes.optim", name, "bitsandbytes", more=more, **others)


def _lion(bits: int, paged: bool) -> _Kind:
    size = _bits(bits, paged)
    return _bnb("Lion", lambda args: {"betas": (float(args.adam_beta1), float(args.adam_beta2)), **size(args)})


_EMA_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("beta1", "beta2", "beta3", "alpha", "eps"), float),
    **dict.fromkeys(("t_alpha", "t_beta3"), int),
}


def _ademamix(bits: int, paged: bool) -> _Kind:
    size = _bits(bits, paged)

    def more(args: TrainingArguments) -> _Settings:
        betas = {"beta1": float(args.adam_beta1), "beta2": float(args.adam_beta2), "beta3": 0.9999}
        return {**betas, "alpha": 5.0, "eps": args.adam_epsilon, **size(args)}

    return _bnb("AdEMAMix", more, options=_EMA_OPTIONS)


_RMS_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("momentum", "alpha", "eps", "weight_decay"), float),
    "centered": _read_bool,
}


def _torchao(name: str) -> _Kind:
    options: Mapping[str, Callable[[str], Any]] = {"block_size": int, "bf16_stochastic_round": _read_bool}
    more = {"block_size": 256, "bf16_stochastic_round": False}
    return _Kind("torchao.optim", name, "torchao", is_adam=True, more=lambda args: dict(more), options=options)


def _schedule_free(name: str, *, is_adam: bool, warms_up: bool = True) -> _Kind:
    def more(args: TrainingArguments) -> _Settings:
        if warms_up and 0 < args.warmup_steps < 1:
            raise ArgumentsError(
                f"warmup_steps={args.warmup_steps} with optim={args.optim!r}: expected a whole number, for it counts its own "
                f"warm-up and does not know the steps of the run. Write warmup_steps=100, or 0."
            )
        warmup = {"warmup_steps": args.warmup_steps} if warms_up else {}
        return {"weight_decay": args.weight_decay, **warmup, "weight_lr_power": 2.0, "r": 0.0}

    options = dict.fromkeys(("weight_lr_power", "r"), float)
    return _Kind("schedulefree", name, "schedulefree", is_adam=is_adam, more=more, options=options)


_GROK = {"alpha_init": 0.98, "lamb": 2.0, "gamma": 0.1, "grokking_signal_decay_rate": 0.1, "gradient_clipping": 1.0}

OPTIMIZER_KINDS: Mapping[str, _Kind] = {
    "adamw_torch_fused": _Kind("torch.optim", "AdamW", is_adam=True),
    "adamw_torch": _Kind("torch.optim", "AdamW", is_adam=True),
    # torch.optim.Adafactor multiplies the rate by the size of the parameter, this one leaves it as it is (test_optimizers.py)
    "adafactor": _Kind(
        "transformers.optimization",
        "Adafactor",
        "transformers",
        more=lambda args: {"scale_parameter": False, "relative_step": False},
    ),
    "sgd": _Kind(
        "torch.optim",
        "SGD",
        options={**dict.fromkeys(("momentum", "dampening", "weight_decay"), float), "nesterov": _read_bool},
    ),
    "adagrad": _Kind("torch.optim", "Adagrad", options=dict.fromkeys(("lr_decay", "weight_decay", "eps"), float)),
    "rmsprop": _Kind("torch.optim", "RMSprop", options=_RMS_OPTIONS),
    "adamw_8bit": _bnb("AdamW", _bits(8, False), is_adam=True),
    "adamw_bnb_8bit": _bnb("AdamW", _bits(8, False), is_adam=True),
    "paged_adamw_32bit": _bnb("AdamW", _bits(32, True), is_adam=True),
    "paged_adamw_8bit": _bnb("AdamW", _bits(8, True), is_adam=True),
    "ademamix": _ademamix(32, False),
    "ademamix_8bit": _ademamix(8, False),
    "paged_ademamix_32bit": _ademamix(32, True),
    "paged_ademamix_8bit": _ademamix(8, True),
    "lion_32bit": _lion(32, False),
    "lion_8bit": _lion(8, False),
    "paged_lion_32bit": _lion(32, True),
    "paged_lion_8bit": _lion(8, True),
    "rmsprop_bnb": _bnb("RMSprop", _bits(32), options=_RMS_OPTIONS),
    "rmsprop_bnb_8bit": _bnb("RMSprop", _bits(8), options=_RMS_OPTIONS),
    "rmsprop_bnb_32bit": _bnb("RMSprop", _bits(32), options=_RMS_OPTIONS),
    "adamw_torch_4bit": _torchao("AdamW4bit"),
    "adamw_torch_8bit": _torchao("AdamW8bit"),
    "schedule_free_radam": _schedule_free("RAdamScheduleFree", is_adam=True, warms_up=False),
    "schedule_free_adamw": _schedule_free("AdamWScheduleFree", is_adam=True),
    "schedule_free_sgd": _schedule_free("SGDScheduleFree", is_adam=False),
    "grokadamw": _Kind(
        "grokadamw", "GrokAdamW", "grokadamw", more=lambda args: dict(_GROK), options=dict.fromkeys(_GROK, float)
    ),
    "stable_adamw": _Kind(
        "optimi",
        "StableAdamW",
        "torch-optimi",
        is_adam=True,
        more=lambda args: {"weight_decay": args.weight_decay, "decouple_lr": False, "max_lr": None, "kahan_sum": None},
        options={"max_lr": float, "decouple_lr": _read_bool, "kahan_sum": _read_bool},
    ),
}
"""By each value of `optim`."""


# ---- one of them


def _loaded(optim: str, kind: _Kind) -> Any:
    if kind.package == "torch":
        return getattr(torch.optim, kind.name)
    try:
        return getattr(importlib.import_module(kind.module), kind.name)
    except (ImportError, AttributeError) as error:
        raise ArgumentsError(
            f"optim={optim!r} is {kind.name} of the package {kind.package}, which cannot be imported here: "
            f"{type(error).__name__}: {error}. Install it (pip install -U {kind.package}), or write another optim."
        ) from error


def _read_options(optim: str, text: str | None, kind: _Kind) -> _Settings:
    """`optim_args`, such as "momentum=0.9,nesterov=true"."""
    settings: _Settings = {}
    for pair in (text or "").replace(" ", "").split(","):
        name, is_pair, value = pair.partition("=")
        if not pair:
            continue
        if not is_pair or name not in kind.options:
            takes = f"settings out of {', '.join(kind.options)}, each as name=value" if kind.options else "none; leave it out"
            raise ArgumentsError(f"optim_args={text!r} of optim={optim!r}: found {pair}, expected {takes}.")
        read = kind.options[name]
        try:
            settings[name] = read(value)
        except ValueError as error:
            raise ArgumentsError(f"optim_args={text!r} of optim={optim!r}: {name} is {value!r}; {error}.") from None
    return settings
