"""How arguments stand to Hugging Face's: which are ours alone, which have nothing to do here, whose work is not done here.

docs/migrating.md shows it, as made by docs/generate_arguments.py; all others mean what they mean there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["NOTHING_TO_DO", "OURS", "REFUSED", "Refused"]

OURS = frozenset(
    (
        "ddp_drift_action",
        "ddp_drift_check_steps",
        "ddp_wait_warning",
        "dataloader_split_streams",
        "deterministic_reduction",
        "global_batch_size",
        "ledger",
        "ledger_digest_steps",
        "nonfinite_gradients",
        "save_failure",
        "save_in_background",
    )
)
"""Arguments that Hugging Face's TrainingArguments does not have (tests/unit/test_hugging_face_fields.py)."""


@dataclass(frozen=True)
class Refused:
    """An argument that has to ask for nothing."""

    harmless: tuple[Any, ...]
    """The values that do; the first is the one to write."""
    why: str
    """Why not, and what to do instead."""


_WHOLE = "every rank holds the whole model here; leave it out, or stay with the engine that it belongs to"
_OWN_OPTIMIZER = "leave it out, or pass Trainer(optimizers=(optimizer, None)) your own"

REFUSED: Mapping[str, Refused] = {
    "fsdp": Refused((None, False, "", []), _WHOLE),
    "deepspeed": Refused((None, "", {}), _WHOLE),
    "parallelism_config": Refused((None,), _WHOLE),
    "use_liger_kernel": Refused(
        (False,), "models are not patched here; leave it out, and call liger_kernel's apply_liger_kernel_to_... in the script"
    ),
    "optim_target_modules": Refused((None, "", []), f"its optimizers are not supported; {_OWN_OPTIMIZER}"),
    "push_to_hub": Refused((False,), "nothing is uploaded from here; leave it out, and upload output_dir after training"),
    "save_on_each_node": Refused(
        (False,), "rank 0 writes each checkpoint once; leave it out, and put output_dir where all hosts see it"
    ),
}
"""Argument → the values that are accepted, and what to do instead of others."""

_UPLOAD = "read by nobody, as nothing is uploaded from here"

NOTHING_TO_DO: Mapping[str, str] = {
    "average_tokens_across_devices": "losses always weigh by the valid label tokens of all ranks",
    "dataloader_in_order": "batches always come in the order of the samples",
    "enable_jit_checkpoint": "a run that SIGTERM stops is always saved, by all ranks at the same step",
    "debug": 'what is not finite is traced without it, by nonfinite_gradients="raise"',
    "accelerator_config": "accepted where it asks for what is done anyway; num_steps sets gradient_accumulation_steps",
    "local_rank": "the launcher's variables tell; reads as before",
    "fsdp_config": "read by nobody where fsdp is off",
    "liger_kernel_config": "read by nobody where use_liger_kernel is off",
    "hub_model_id": _UPLOAD,
    "hub_token": f"{_UPLOAD}; never written down",
    "hub_private_repo": _UPLOAD,
    "hub_strategy": _UPLOAD,
    "hub_always_push": _UPLOAD,
    "hub_revision": _UPLOAD,
}
"""Argument → why it is accepted and changes nothing."""
