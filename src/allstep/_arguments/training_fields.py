"""The arguments that decide what training computes: how much, optimizer and schedule, precision, memory, engine.

Fields only: checks are in `checks`, and what follows from the values in `allstep.arguments`. A sentence under each field tells
what it changes and its unit; the command line and docs/arguments.md show it, under the headings that stand here as comments.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

__all__ = ["TrainingFields"]


@dataclass
class TrainingFields:
    """What training computes."""

    output_dir: str | None = None
    """Folder for checkpoints and logs, made when missing. None: "trainer_output"."""

    _: KW_ONLY

    # ---- how much
    per_device_train_batch_size: int = 8
    """Samples of one micro-batch on one rank, in training. The global batch is this × accumulation × world size."""
    per_device_eval_batch_size: int = 8
    """Samples of one batch on one rank, in evaluation and prediction. Changes memory and speed, never the result."""
    gradient_accumulation_steps: int = 1
    """Micro-batches of one optimizer step on each rank. Gradients are reduced once a step, on the last of them."""
    auto_find_batch_size: bool = False
    """When a rank runs out of memory, go on with micro-batches of half the size, twice as many of them: a step consists of the
    same samples as before, and is taken again."""
    global_batch_size: int | None = None
    """Samples of one optimizer step on all ranks. When set, accumulation follows from it and the world size, so that a
    step consists of the same samples on any number of ranks. None: micro-batch × accumulation × world size."""
    num_train_epochs: float = 3.0
    """Passes over the training data; 0.5 ends in the middle of the first. Ignored when `max_steps` is positive."""
    max_steps: int = -1
    """Optimizer steps in all; overrides `num_train_epochs` when positive. Needed for data without a length."""

    # ---- optimizer and schedule
    learning_rate: float = 5e-5
    """Peak learning rate: the optimizer's rate before the schedule multiplies it."""
    lr_scheduler_type: str = "linear"
    """Shape of the learning rate over the steps: linear, cosine, cosine_with_restarts, polynomial, constant,
    constant_with_warmup, inverse_sqrt, cosine_with_min_lr, cosine_warmup_with_min_lr or warmup_stable_decay; or by what
    evaluations say of `metric_for_best_model`, in the direction of `greater_is_better`: reduce_lr_on_plateau or greedy."""
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    """Further settings of the schedule, such as {"num_cycles": 2}; a dictionary or its JSON."""
    warmup_steps: float = 0
    """Steps over which the learning rate climbs from 0 to its peak: a whole number, or a share of all below 1."""
    optim: str = "adamw_torch_fused"
    """Optimizer: adamw_torch_fused (adamw_torch where the device has no fused kernel), adamw_torch, sgd, adagrad or
    rmsprop; or one that a library brings, such as adafactor (transformers) or adamw_bnb_8bit (bitsandbytes)."""
    optim_args: str | None = None
    """Further settings of the optimizer, as text: "momentum=0.9,nesterov=True"."""
    weight_decay: float = 0.0
    """Weight decay per unit of learning rate; not applied to biases, normalisation layers and other vectors."""
    adam_beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: float = 0.999
    """Decay of AdamW's mean of squared gradients."""
    adam_epsilon: float = 1e-8
    """Added to AdamW's denominator; larger damps steps of parameters with tiny gradients."""
    max_grad_norm: float = 1.0
    """Gradients of larger norm, over all parameters, are scaled down to it before the step. 0 turns clipping off."""
    nonfinite_gradients: str = "raise"
    """When a gradient is NaN or infinite: "raise" an error that names rank, parameter and samples, before the optimizer moves;
    "skip" the step, which counts but does not move the schedule; "ignore": do not look."""

    # ---- loss
    label_smoothing_factor: float = 0.0
    """Share of the target that is spread evenly over all classes, 0 to 1. 0: none."""
    average_tokens_across_devices: bool = True
    """Weigh losses by the valid label tokens of the whole global batch. Always done, so False changes nothing."""
    neftune_noise_alpha: float | None = None
    """Strength of the noise added to input embeddings in training (NEFTune). None: none."""

    # ---- numbers and seeds
    bf16: bool = False
    """Run forward and loss under bfloat16 autocast; parameters, gradients and optimizer stay as they are."""
    fp16: bool = False
    """Run forward and loss under float16 autocast, with a loss scale that all ranks share; one of `bf16` and `fp16`."""
    bf16_full_eval: bool = False
    """Cast the model itself to bfloat16 for evaluation and prediction: smaller activations, less precise metrics. The trained
    weights are held beside it, and stay as they are."""
    fp16_full_eval: bool = False
    """The same in float16."""
    tf32: bool | None = None
    """Multiply float32 matrices in TF32 on GPUs that have it: faster, less precise. None: as torch is set."""
    seed: int = 42
    """Seed of everything random, the same on every rank; 0 to 2**32 - 1."""
    data_seed: int | None = None
    """Seed of the order of the samples. None: `seed`."""
    full_determinism: bool = False
    """Ask torch for deterministic kernels only: the same bits when run again, slower on some devices."""
    use_cpu: bool = False
    """Stay on the CPU also where there is an accelerator."""
    deterministic_reduction: Literal[True, False, "auto"] = "auto"
    """Sum gradients over micro-batches and ranks in an order that does not depend on the number of ranks: a binary tree
    over the global batch's micro-batches. 1, 2, 4, … ranks then give the same bits, where each runs a power of two of them.
    It holds log2(accumulation) - 1 more sets of gradients. "auto": on the CPU, where it costs next to nothing."""

    # ---- memory and speed
    gradient_checkpointing: bool | None = None
    """Forget activations in forward and recompute them in backward: less memory, about a third more compute.
    The same switch as `activation_checkpointing`, its newer name. None: off."""
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = None
    """Settings of the recomputation, such as {"use_reentrant": false}; a dictionary or its JSON. The older name."""
    activation_checkpointing: bool | None = None
    """The newer name of `gradient_checkpointing`; give one of the two. None: off."""
    activation_checkpointing_kwargs: dict[str, Any] | str | None = None
    """The newer name of `gradient_checkpointing_kwargs`; give one of the two."""
    torch_compile: bool = False
    """Compile the model with torch.compile before training. Switched on by either of the two below."""
    torch_compile_backend: str | None = None
    """Backend of torch.compile. None: "inductor"."""
    torch_compile_mode: str | None = None
    """Mode of torch.compile: "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs". None: "default"."""
    use_cache: bool = False
    """Keep the keys and values of attention in training; of no use there, and written to `model.config.use_cache`."""
    torch_empty_cache_steps: int | None = None
    """Optimizer steps between two clearings of the device's cached memory: lower peaks, slower steps. None: never."""

    # ---- data-parallel engine
    ddp_find_unused_parameters: bool | None = None
    """True: walk the autograd graph at the end of forward and mark parameters that will get no gradient as ready, so
    that their buckets are reduced early. None: such parameters are handled at the end of backward, without a walk.
    False: a parameter without a gradient is an error that names it."""
    ddp_bucket_cap_mb: float | None = None
    """Size of a gradient bucket in MiB. Larger: fewer all-reduce calls, less overlap with backward.
    None: 1 where ranks share memory, else 5 on the CPU and 25 elsewhere, with a first and last bucket of at most 1."""
    ddp_broadcast_buffers: bool | None = None
    """Send rank 0's buffers (BatchNorm statistics) to all ranks at the first forward of each step. None: True."""
    ddp_static_graph: bool | None = None
    """Promise that every step uses the same parameters in the same way. None: False."""
    ddp_backend: str | None = None
    """How ranks talk: nccl (NVIDIA), shm (CPU ranks of one host, by shared memory), gloo (CPU), mpi, xccl, hccl, cncl, mccl
    where torch has them. None: chosen by device."""
    ddp_timeout: float = 1800
    """Seconds that joining and every collective may take, on every kind of device; then an error instead of a wait."""
    ddp_wait_warning: float = 60.0
    """Seconds that a rank waits for others before rank 0 tells who is late, and where; again when the wait has doubled.
    0: only of ranks whose process is stopped or gone."""
    ddp_drift_check_steps: int = 0
    """Optimizer steps between two comparisons of all ranks' weights, bit by bit; each reads all weights once. 0: only before
    each checkpoint."""
    ddp_drift_action: str = "raise"
    """Where weights differ between ranks: "raise" an error that names step, rank and tensor, or "repair" them: the weights and
    optimizer state of the majority of ranks, or of rank 0 where there is none, are given to all."""
