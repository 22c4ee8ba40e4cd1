"""The values that arguments with a choice of names can have, and what to do instead of those that are not supported."""

from collections.abc import Mapping

__all__ = [
    "LOG_LEVELS",
    "OPTIMIZERS",
    "OPTIMIZERS_OF_LIBRARIES",
    "OPTIMIZERS_REFUSED",
    "SCHEDULES",
    "SCHEDULES_BY_EVALUATION",
    "TRACKERS",
]

SCHEDULES_BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")
"""Values of `lr_scheduler_type` that follow a metric of evaluations."""
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    *SCHEDULES_BY_EVALUATION,
)
"""Values of `lr_scheduler_type`; the formulas are in trainer/optimization/schedulers.py (tests/unit/test_schedulers.py)."""

OPTIMIZERS_OF_LIBRARIES: Mapping[str, str] = {
    "adamw_bnb_8bit": "bitsandbytes",
    "adamw_8bit": "bitsandbytes",
    "ademamix": "bitsandbytes",
    "ademamix_8bit": "bitsandbytes",
    "lion_8bit": "bitsandbytes",
    "lion_32bit": "bitsandbytes",
    "paged_adamw_32bit": "bitsandbytes",
    "paged_adamw_8bit": "bitsandbytes",
    "paged_ademamix_32bit": "bitsandbytes",
    "paged_ademamix_8bit": "bitsandbytes",
    "paged_lion_32bit": "bitsandbytes",
    "paged_lion_8bit": "bitsandbytes",
    "rmsprop_bnb": "bitsandbytes",
    "rmsprop_bnb_8bit": "bitsandbytes",
    "rmsprop_bnb_32bit": "bitsandbytes",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
    "grokadamw": "grokadamw",
    "stable_adamw": "torch-optimi",
    "schedule_free_radam": "schedulefree",
    "schedule_free_adamw": "schedulefree",
    "schedule_free_sgd": "schedulefree",
}
"""Values of `optim` that need a package → its name on PyPI."""
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop", "adafactor", *OPTIMIZERS_OF_LIBRARIES)
"""Values of `optim`; allstep.trainer.optimization.optimizers makes them (tests/unit/test_optimizers.py)."""

_OWN = "pass Trainer(optimizers=(optimizer, None)) one that you made"
_PROJECTED = f"it projects the gradients of single modules; write optim='adafactor' to save memory, or {_OWN}"
_IN_BACKWARD = "it steps inside backward, before gradients are summed over ranks; write optim='adafactor' to save memory"
_DEVICE = "it is made for one kind of device; write optim='adamw_torch_fused', which falls back where there is no fused kernel"
OPTIMIZERS_REFUSED: Mapping[str, str] = {
    "adamw_torch_xla": _DEVICE,
    "adamw_torch_npu_fused": _DEVICE,
    "adamw_anyprecision": f"its package (torchdistx) is no longer kept up; write optim='adamw_torch', or {_OWN}",
    "galore_adamw": _PROJECTED,
    "galore_adamw_8bit": _PROJECTED,
    "galore_adafactor": _PROJECTED,
    "galore_adamw_layerwise": _PROJECTED,
    "galore_adamw_8bit_layerwise": _PROJECTED,
    "galore_adafactor_layerwise": _PROJECTED,
    "apollo_adamw": _PROJECTED,
    "apollo_adamw_layerwise": _PROJECTED,
    "lomo": _IN_BACKWARD,
    "adalomo": _IN_BACKWARD,
}
"""Names of Hugging Face's `optim` that are not supported → why, and what to write instead."""

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Names in `report_to`; allstep.report.trackers has a class for each (tests/unit/test_trackers.py)."""

LOG_LEVELS: Mapping[str, int] = {
    "detail": 10,
    "debug": 10,
    "info": 20,
    "warning": 30,
    "error": 40,
    "critical": 50,
    "passive": -1,
}
"""Values of `log_level` → levels of `logging`; passive leaves the level alone."""
