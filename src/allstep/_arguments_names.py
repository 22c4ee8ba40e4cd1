"""Names that are no argument, and what to write instead: Hugging Face's other fields, old names, slips of the pen."""

import difflib
from collections.abc import Collection, Iterable, Mapping

__all__ = ["ELSEWHERE", "explain_unknown", "unknown_names_message"]

_LATER = "not supported yet; leave it out"
_HUB = "nothing is uploaded from here; leave it out and upload output_dir after training"
_OTHER_ENGINE = "another engine's switch; the model here is held whole by every rank; leave it out"
_TRACKER = "no tracker is built in; leave it out and pass Trainer(callbacks=[...]) one that logs"

ELSEWHERE: Mapping[str, str] = {
    # names of Hugging Face's TrainingArguments, or of older versions of it, that have a counterpart
    "accelerator_config": "no switch is needed: every sample is used exactly once, shuffled by data_seed; leave it out",
    "average_tokens_across_devices": "always done: losses weigh by the valid label tokens over all ranks; leave it out",
    "dispatch_batches": "every rank reads its own part of the data; leave it out",
    "evaluation_strategy": "write eval_strategy",
    "evaluate_during_training": 'write eval_strategy="steps"',
    "fp16": "write bf16=True",
    "fp16_backend": "write bf16=True",
    "fp16_full_eval": "write bf16=True",
    "fp16_opt_level": "write bf16=True",
    "half_precision_backend": "write bf16=True",
    "include_inputs_for_metrics": 'write include_for_metrics=["inputs"]',
    "local_rank": "the launcher's variables say it; read args.local_rank instead of setting it",
    "logging_dir": "logs go to output_dir; leave it out",
    "no_cuda": "write use_cpu=True",
    "overwrite_output_dir": "training resumes only where train(resume_from_checkpoint=...) asks for it; leave it out",
    "per_gpu_eval_batch_size": "write per_device_eval_batch_size",
    "per_gpu_train_batch_size": "write per_device_train_batch_size",
    "save_safetensors": "models are always saved as safetensors; leave it out",
    "split_batches": "per_device_train_batch_size always counts the samples of one rank; leave it out",
    "use_mps_device": "the device is found without it; leave it out",
    "warmup_ratio": "write warmup_steps=0.1 for a tenth of all steps, warmup_steps=100 for a hundred steps",
    "xpu_backend": "write ddp_backend",
    # words of other trainers
    "batch_size": "write per_device_train_batch_size, the samples of one micro-batch on one rank",
    "epochs": "write num_train_epochs",
    "lr": "write learning_rate",
    "lr_scheduler": "write lr_scheduler_type",
    "optimizer": "write optim, or Trainer(optimizers=(optimizer, scheduler)) for one of your own",
    # Hugging Face's fields without a counterpart
    "adafactor": _LATER,
    "bf16_full_eval": _LATER,
    "dataloader_in_order": "batches always come in order; leave it out",
    "dataloader_multiprocessing_context": _LATER,
    "debug": _LATER,
    "deepspeed": _OTHER_ENGINE,
    "enable_jit_checkpoint": _LATER,
    "eval_accumulation_steps": _LATER,
    "eval_do_concat_batches": "outputs are always concatenated, in dataset order; leave it out",
    "eval_use_gather_object": _LATER,
    "fsdp": _OTHER_ENGINE,
    "fsdp_config": _OTHER_ENGINE,
    "fsdp_min_num_params": _OTHER_ENGINE,
    "fsdp_transformer_layer_cls_to_wrap": _OTHER_ENGINE,
    "group_by_length": _LATER,
    "hub_always_push": _HUB,
    "hub_model_id": _HUB,
    "hub_private_repo": _HUB,
    "hub_revision": _HUB,
    "hub_strategy": _HUB,
    "hub_token": _HUB,
    "ignore_data_skip": "a resumed run always continues where its data stopped; leave it out",
    "include_num_input_tokens_seen": _LATER,
    "include_tokens_per_second": _LATER,
    "jit_mode_eval": _LATER,
    "label_smoothing_factor": "not supported yet; pass Trainer(compute_loss_func=...) a loss that smooths",
    "length_column_name": _LATER,
    "liger_kernel_config": _LATER,
    "log_level": _LATER,
    "log_level_replica": _LATER,
    "log_on_each_node": _LATER,
    "logging_nan_inf_filter": "a loss that is not finite is always shown; leave it out",
    "mp_parameters": _OTHER_ENGINE,
    "neftune_noise_alpha": _LATER,
    "optim_args": "not supported yet; pass Trainer(optimizers=(optimizer, None)) one that you made",
    "optim_target_modules": "not supported yet; pass Trainer(optimizers=(optimizer, None)) one that you made",
    "parallelism_config": _OTHER_ENGINE,
    "past_index": _LATER,
    "project": _TRACKER,
    "push_to_hub": _HUB,
    "push_to_hub_model_id": _HUB,
    "push_to_hub_organization": _HUB,
    "push_to_hub_token": _HUB,
    "ray_scope": _LATER,
    "restore_callback_states_from_checkpoint": _LATER,
    "save_on_each_node": "rank 0 writes for all; leave it out",
    "sharded_ddp": _OTHER_ENGINE,
    "skip_memory_metrics": _LATER,
    "tf32": "not supported yet; call torch.set_float32_matmul_precision in the script",
    "torch_compile": _LATER,
    "torch_compile_backend": _LATER,
    "torch_compile_mode": _LATER,
    "torch_empty_cache_steps": _LATER,
    "torchdynamo": _LATER,
    "tpu_metrics_debug": _LATER,
    "tpu_num_cores": _LATER,
    "trackio_bucket_id": _TRACKER,
    "trackio_space_id": _TRACKER,
    "trackio_static_space_id": _TRACKER,
    "train_sampling_strategy": "samples always come shuffled by data_seed; leave it out",
    "use_cache": "not supported yet; set model.config.use_cache in the script",
    "use_ipex": _LATER,
    "use_legacy_prediction_loop": _LATER,
    "use_liger_kernel": _LATER,
}
"""Name → what to write instead. No name here is a field of TrainingArguments (tests/unit/test_arguments.py)."""


def explain_unknown(name: str, known: Collection[str], elsewhere: Mapping[str, str] = ELSEWHERE) -> str:
    """One sentence on a name that is not among `known`: what to write instead, or the nearest names."""
    if name in elsewhere:
        return f"'{name}': {elsewhere[name]}"
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.65)
    return f"'{name}': did you mean {' or '.join(close)}?" if close else f"'{name}': no argument has a name like it"


def unknown_names_message(
    owner: str, names: Iterable[str], known: Collection[str], elsewhere: Mapping[str, str] = ELSEWHERE
) -> str:
    """The text of the TypeError for arguments that `owner` does not have, one line each."""
    lines = [f"\n  {explain_unknown(name, known, elsewhere)}" for name in names]
    return f"{owner} has no such argument{'s' if len(lines) > 1 else ''}:{''.join(lines)}"
