"""The arguments around training: logs, evaluation, checkpoints, data; and those whose service is not part of this package.

Fields only, as in `training_fields`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from allstep._arguments.training_fields import TrainingFields

__all__ = ["RunFields"]


@dataclass(kw_only=True)
class RunFields(TrainingFields):
    """What training computes, and what happens around it."""

    # ---- what a script does
    do_train: bool = False
    """For the script to read: whether to train. Trainer does not look at it."""
    do_eval: bool = False
    """For the script to read: whether to evaluate. Becomes True when `eval_strategy` is not "no"."""
    do_predict: bool = False
    """For the script to read: whether to predict. Trainer does not look at it."""
    resume_from_checkpoint: str | None = None
    """For the script to read: what to hand to `Trainer.train(resume_from_checkpoint=...)`: a checkpoint folder, "true" for the
    newest whole one, "auto" for that or the beginning, "false"."""
    local_rank: int = field(default=-1, repr=False, compare=False)
    """Accepted because old launchers pass it; what it says is ignored. Reads as this process's rank on its host, as the
    launcher's variables say, and -1 where nobody launched it."""

    # ---- logs
    logging_strategy: str = "steps"
    """When to log: no, steps or epoch."""
    logging_steps: float = 500
    """Optimizer steps between two logs; a number below 1 is a share of all steps."""
    logging_first_step: bool = False
    """Also log the first optimizer step."""
    logging_nan_inf_filter: bool = True
    """Leave steps whose loss is not finite out of the logged mean. What trains is not touched by it."""
    include_num_input_tokens_seen: str | bool = "no"
    """Count the input tokens of all ranks and log them: no, all, or non_padding (those that the attention mask keeps)."""
    skip_memory_metrics: bool = True
    """False: measure how much memory each stage took, and add it to the metrics."""
    log_level: str = "passive"
    """Messages of `logging` to show on the process that logs: detail, debug, info, warning, error, critical, or passive,
    which leaves the level alone."""
    log_level_replica: str = "warning"
    """The same for the other processes."""
    log_on_each_node: bool = True
    """Let rank 0 of every host log by `log_level`. False: of the first host only."""
    report_to: list[str] | str | None = "none"
    """Where to log beside `metrics.jsonl`: tensorboard, wandb, mlflow, trackio, a list of them, all (what is installed) or
    none. Reads as a list afterwards."""
    run_name: str | None = None
    """Name of the run, for trackers and callbacks that show one."""
    project: str = "huggingface"
    """Name of the project in a tracker that has projects (trackio)."""
    trackio_space_id: str | None = None
    """Space that Trackio logs to. None: this machine only."""
    trackio_bucket_id: str | None = None
    """Bucket in which Trackio keeps what it logs. None: Trackio's choice."""
    trackio_static_space_id: Literal[False] | str | None = None
    """Space for a static page that Trackio makes after training. None: Trackio's choice; False: none."""
    disable_tqdm: bool | None = None
    """True: no progress bar. None: a bar where standard error is a terminal, one line an event elsewhere."""
    debug: list[str] | str = ""
    """"underflow_overflow" asks to trace numbers that overflow: `nonfinite_gradients` does, with or without it. Reads as a
    list afterwards."""
    ledger: bool = False
    """Write down what each step was made of, on every rank: samples, weights, losses, in `ledger/` of the output folder.
    A file of some hundred bytes a micro-batch, by which runs are compared and replayed."""
    ledger_digest_steps: int = 0
    """Also write digests of every gradient, parameter and buffer, each so many steps; it reads all of them. 0: never."""

    # ---- evaluation
    eval_strategy: str = "no"
    """When to evaluate during training: no, steps or epoch."""
    eval_steps: float | None = None
    """Optimizer steps between two evaluations; a number below 1 is a share of all steps. None: `logging_steps`."""
    eval_delay: float = 0
    """Steps (`eval_strategy="steps"`) or epochs ("epoch") to wait before the first evaluation."""
    eval_on_start: bool = False
    """Evaluate once before the first step."""
    prediction_loss_only: bool = False
    """Keep only the loss in evaluation and prediction: no outputs are gathered, `compute_metrics` is not called."""
    include_for_metrics: list[str] = field(default_factory=list)
    """What `compute_metrics` gets besides predictions and labels: "inputs", "loss"."""
    batch_eval_metrics: bool = False
    """Call `compute_metrics(prediction, compute_result)` with each batch, in dataset order, on every rank, and take what it
    returns for the last one, where `compute_result` is True: nothing is kept but what it keeps itself."""
    eval_do_concat_batches: bool = True
    """Give `compute_metrics` one array of all outputs, in dataset order. False: a list with those of each batch."""
    eval_accumulation_steps: int | None = None
    """Batches whose outputs stay on the device before they move to the host's memory. None: as it suits."""
    eval_use_gather_object: bool = False
    """Outputs and labels may be any Python objects, gathered by pickling, where not all of them are tensors."""
    label_names: list[str] | None = None
    """Keys of a batch that are labels. None: found from the arguments of the model's forward."""

    # ---- checkpoints
    save_strategy: str = "steps"
    """When to save: no, steps, epoch, or best (after an evaluation with a new best metric)."""
    save_steps: float = 500
    """Optimizer steps between two checkpoints; a number below 1 is a share of all steps."""
    save_total_limit: int | None = None
    """Checkpoints to keep; the oldest go first, never the newest and the best. None: all."""
    save_only_model: bool = False
    """Save no optimizer, schedule and random state: smaller, but training cannot be resumed from it."""
    save_in_background: bool = False
    """Copy what is to be saved into the host's memory, and write it while training goes on; `on_save` comes some steps later.
    It takes memory for one more model and optimizer on rank 0. False: training waits, and `on_save` finds the checkpoint of
    its own step, as callbacks of Hugging Face's expect."""
    save_failure: str = "continue"
    """When the disk refuses a checkpoint (full, a quota, read-only): "continue" warns, keeps training, and says so again at
    the end of the run; "stop" is an error on every rank. A folder that cannot be written before training is always an error."""
    save_on_each_node: bool = False
    """Only False: rank 0 writes each checkpoint, once."""
    enable_jit_checkpoint: bool = False
    """Save when asked to stop by SIGTERM. Always done, on all ranks at the same step, so True changes nothing."""
    load_best_model_at_end: bool = False
    """Load the best checkpoint when training ends. Needs checkpoints at evaluated steps."""
    metric_for_best_model: str | None = None
    """Metric of `evaluate()` that says what is best, with or without "eval_". None: "loss" where one is needed."""
    greater_is_better: bool | None = None
    """Direction of the best metric. None: False where its name ends in "loss", else True."""
    ignore_data_skip: bool = False
    """When training resumes, begin the data anew. False: go on behind the last sample that was used."""
    restore_callback_states_from_checkpoint: bool = False
    """When training resumes, give callbacks that have a state the one that was saved."""

    # ---- loading data
    train_sampling_strategy: str = "random"
    """Order of the training samples: random, sequential, group_by_length (samples of a global batch have like lengths) or
    batch_rebalance (ranks get like numbers of tokens)."""
    length_column_name: str = "length"
    """Column of the dataset with the length of each sample, for the strategies that look at it."""
    dataloader_drop_last: bool = False
    """Leave out the last samples of an epoch that fill no global batch. False: every sample is used exactly once."""
    dataloader_num_workers: int = 0
    """Processes of each rank that load data; 0 loads in the rank itself."""
    dataloader_pin_memory: bool = True
    """Put batches in page-locked memory, so that copies to an accelerator run beside compute. Nothing on CPU."""
    dataloader_persistent_workers: bool = False
    """Keep loading processes from one epoch to the next. Needs `dataloader_num_workers`."""
    dataloader_prefetch_factor: int | None = None
    """Batches that each loading process holds ready. Needs `dataloader_num_workers`. None: 2."""
    dataloader_multiprocessing_context: str | None = None
    """How loading processes are started: fork, spawn or forkserver. None: torch's choice."""
    dataloader_in_order: bool = True
    """Yield batches in the order of the samples. Always done, so False changes nothing."""
    dataloader_split_streams: str = "samples"
    """How a stream (IterableDataset) is split among ranks. "samples": every rank reads all of it and keeps its own samples, so
    that a step consists of the same ones on any number of ranks. "shards": each rank reads shards of its own, where the
    stream has `num_shards` and `shard`; less to read, but what is in a step depends on the number of ranks."""
    remove_unused_columns: bool = True
    """Drop columns of a dataset that the model's forward does not take."""
    accelerator_config: dict[str, Any] | str | None = None
    """What Accelerate is told of data and accumulation: a dictionary, its JSON or a JSON file. Accepted where it asks for what
    is done here: every sample used exactly once, in an order that `data_seed` fixes."""

    # ---- other engines, kernels and services
    fsdp: str | None = None
    """Only None, False or "": another engine. Every rank holds the whole model here."""
    fsdp_config: dict[str, Any] | str | None = None
    """Settings of `fsdp`; nothing looks at them."""
    deepspeed: dict[str, Any] | str | None = None
    """Only None: another engine."""
    parallelism_config: Any = None
    """Only None: another engine's layout of ranks."""
    use_liger_kernel: bool = False
    """Only False: kernels that another package patches into a model. It can be called before the Trainer is made."""
    liger_kernel_config: dict[str, bool] | None = None
    """Settings of `use_liger_kernel`; nothing looks at them."""
    optim_target_modules: list[str] | str | None = None
    """Only None: modules of optimizers that are not supported (GaLore, APOLLO)."""
    push_to_hub: bool = False
    """Only False: nothing is uploaded from here."""
    hub_model_id: str | None = None
    """Where to upload to; nothing looks at it, but scripts may."""
    hub_token: str | None = field(default=None, repr=False)
    """Secret for uploads; nothing looks at it, and it is never written down."""
    hub_private_repo: bool | None = None
    """Whether uploads are private; nothing looks at it."""
    hub_strategy: str = "every_save"
    """When to upload: end, every_save, checkpoint or all_checkpoints; nothing looks at it."""
    hub_always_push: bool = False
    """Whether to upload while an upload runs; nothing looks at it."""
    hub_revision: str | None = None
    """Branch to upload to; nothing looks at it."""
