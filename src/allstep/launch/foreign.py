"""Flags and keys of torchrun and accelerate that are not settings here: those without effect, and those that are refused."""

__all__ = ["WITHOUT_EFFECT", "refusal"]

WITHOUT_EFFECT = {
    "multi_gpu": False,
    "same_network": False,
    "quiet": False,
    "debug": False,
    "enable_cpu_affinity": False,
    "downcast_bf16": False,
    "no_tpu_cluster": False,
    "role": True,
    "start_method": True,
    "redirects": True,
    "local_addr": True,
    "event_log_handler": True,
    "logs_specs": True,
    "local_ranks_filter": True,
    "duplicate_stdout_filters": True,
    "duplicate_stderr_filters": True,
    "numa_binding": True,
    "signals_to_handle": True,
    "main_training_function": True,
}
"""Flag → whether a value follows it. They change nothing of what is trained, or say what holds here anyway."""

_WHOLE = "allstep keeps a whole model on each rank; "
_DEEPSPEED = f"{_WHOLE}start scripts for DeepSpeed with `accelerate launch --use_deepspeed` or `deepspeed`"
_FSDP = f"{_WHOLE}start scripts that shard it with `accelerate launch --use_fsdp`, or call torch's fully_shard yourself"
_MEGATRON = f"{_WHOLE}start scripts for Megatron-LM with `accelerate launch --use_megatron_lm`"
_TPU = "there is no backend for TPUs here; use `accelerate launch --tpu`"
_COMPILE = "call torch.compile(model) in the script"
_CLOUD = "no cloud machines are started from here; run `allstep launch` on each machine"

_REFUSED = {
    "use_deepspeed": _DEEPSPEED,
    "deepspeed": _DEEPSPEED,
    "zero": _DEEPSPEED,
    "offload": _DEEPSPEED,
    "use_fsdp": _FSDP,
    "fsdp": _FSDP,
    "use_parallelism_config": _FSDP,
    "parallelism_config": _FSDP,
    "tp": _FSDP,
    "use_megatron_lm": _MEGATRON,
    "megatron_lm": _MEGATRON,
    "tpu": _TPU,
    "xla": _TPU,
    "vm": _TPU,
    "env": "set variables before the command, `NAME=VALUE allstep launch ...`",
    "dynamo": _COMPILE,
    "fp8": "fp8 is not there yet; write bf16=True in the arguments of the script",
    "fp16": "write fp16=True in the arguments of the script, or --mixed_precision fp16",
    "aws": _CLOUD,
    "amazon_sagemaker": _CLOUD,
    "sagemaker": _CLOUD,
    "mpirun": "start with mpirun itself, whose variables allstep reads: `mpirun --hostfile FILE python train.py`",
    "gradient_accumulation_steps": "it is an argument of the script: write it after SCRIPT",
    "gradient_clipping": "it is an argument of the script, max_grad_norm: write it after SCRIPT",
    "use_xpu": "devices are found by themselves; leave it out",
    "ipex": "devices are found by themselves; leave it out",
    "run_path": "leave it out; SCRIPT is run as Python runs it",
    "virtual_local_rank": "leave it out; each rank takes the device numbered like its LOCAL_RANK",
}
"""Word, or the first words of a family such as fsdp_version → what to do instead."""


def refusal(word: str) -> str | None:
    """Why a flag or key of torchrun or accelerate is refused, and what to write instead; None for words of nobody."""
    parts = word.replace("-", "_").lower().split("_")
    for length in range(len(parts), 0, -1):
        family = "_".join(parts[:length])
        found = _REFUSED.get(family) or _REFUSED.get(family.rstrip("0123456789"))  # zero3_init_flag is of zero
        if found is not None:
            return found
    return None
