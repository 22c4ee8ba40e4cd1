"""`TrainingArguments`: everything a run can be told, under the names known from Hugging Face, checked once.

A sentence under each field tells what it changes and its unit; the command line (`allstep.argument_parser`) shows it as
help. Names, defaults and meanings are those of Hugging Face's TrainingArguments unless the sentence says otherwise.
"""

import copy
import dataclasses
import inspect
import json
import math
import os
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar

from allstep._arguments_checks import normalise, problems
from allstep._arguments_names import unknown_names_message
from allstep.environment import WorkerEnvironment
from allstep.errors import ArgumentsError

__all__ = ["TrainingArguments"]

_Arguments = TypeVar("_Arguments", bound="TrainingArguments")


class _InitSignature:
    """Shows the arguments of `__init__` in help() and editors, where `__new__` would show `*args, **kwargs`."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]  # of that very class
        return signature.replace(parameters=list(signature.parameters.values())[1:])


@dataclass
class TrainingArguments:
    """How to train. Checked when made: every problem found is reported in one message.

    Subclass it as a dataclass to add arguments of your own. allstep never changes an object that you made.

    Raises:
        ArgumentsError: values that cannot hold together.
        TypeError: a name that is not an argument; the message says what to write instead.
    """

    output_dir: str | None = None
    """Folder for checkpoints and logs, made when missing. None: "trainer_output"."""

    _: KW_ONLY

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
    constant_with_warmup, inverse_sqrt, cosine_with_min_lr or warmup_stable_decay."""
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    """Further settings of the schedule, such as {"num_cycles": 2}; a dictionary or its JSON."""
    warmup_steps: int | float = 0
    """Steps over which the learning rate climbs from 0 to its peak: a whole number, or a share of all below 1."""
    optim: str = "adamw_torch_fused"
    """Optimizer: adamw_torch_fused (adamw_torch where the device has no fused kernel), adamw_torch, sgd, adagrad or
    rmsprop."""
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

    # ---- numbers and seeds
    bf16: bool = False
    """Run forward and loss under bfloat16 autocast; parameters, gradients and optimizer stay as they are."""
    seed: int = 42
    """Seed of everything random, the same on every rank; 0 to 2**32 - 1."""
    data_seed: int | None = None
    """Seed of the order of the samples. None: `seed`."""
    full_determinism: bool = False
    """Ask torch for deterministic kernels only: the same bits when run again, slower on some devices."""
    use_cpu: bool = False
    """Stay on the CPU also where there is an accelerator."""

    deterministic_reduction: bool | str = "auto"
    """Sum gradients over micro-batches and ranks in an order that does not depend on the number of ranks: a binary tree
    over the global batch's micro-batches. 1, 2, 4, … ranks then give the same bits, where each runs a power of two of them.
    It holds log2(accumulation) - 1 more sets of gradients. "auto": on the CPU, where it costs next to nothing."""

    # ---- memory
    gradient_checkpointing: bool | None = None
    """Forget activations in forward and recompute them in backward: less memory, about a third more compute.
    The same switch as `activation_checkpointing`, its newer name. None: off."""
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = None
    """Settings of the recomputation, such as {"use_reentrant": false}; a dictionary or its JSON. The older name."""
    activation_checkpointing: bool | None = None
    """The newer name of `gradient_checkpointing`; give one of the two. None: off."""
    activation_checkpointing_kwargs: dict[str, Any] | str | None = None
    """The newer name of `gradient_checkpointing_kwargs`; give one of the two."""

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

    # ---- logs
    logging_strategy: str = "steps"
    """When to log: no, steps or epoch."""
    logging_steps: int | float = 500
    """Optimizer steps between two logs; a number below 1 is a share of all steps."""
    logging_first_step: bool = False
    """Also log the first optimizer step."""
    report_to: str | list[str] = "none"
    """Where to log beside `metrics.jsonl`: tensorboard, all (what is installed) or none. Reads as a list afterwards."""
    run_name: str | None = None
    """Name of the run, for callbacks that show one."""
    disable_tqdm: bool | None = None
    """True: no progress bar. None: a bar where standard error is a terminal, one line an event elsewhere."""

    ledger: bool = False
    """Write down what each step was made of, on every rank: samples, weights, losses, in `ledger/` of the output folder.
    A file of some hundred bytes a micro-batch, by which runs are compared and replayed."""
    ledger_digest_steps: int = 0
    """Also write digests of every gradient, parameter and buffer, each so many steps; it reads all of them. 0: never."""

    # ---- evaluation
    eval_strategy: str = "no"
    """When to evaluate during training: no, steps or epoch."""
    eval_steps: int | float | None = None
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
    label_names: list[str] | None = None
    """Keys of a batch that are labels. None: found from the arguments of the model's forward."""

    # ---- checkpoints
    save_strategy: str = "steps"
    """When to save: no, steps, epoch, or best (after an evaluation with a new best metric)."""
    save_steps: int | float = 500
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
    load_best_model_at_end: bool = False
    """Load the best checkpoint when training ends. Needs checkpoints at evaluated steps."""
    metric_for_best_model: str | None = None
    """Metric of `evaluate()` that says what is best, with or without "eval_". None: "loss" where one is needed."""
    greater_is_better: bool | None = None
    """Direction of the best metric. None: False where its name ends in "loss", else True."""

    # ---- loading data
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
    dataloader_split_streams: str = "samples"
    """How a stream (IterableDataset) is split among ranks. "samples": every rank reads all of it and keeps its own samples, so
    that a step consists of the same ones on any number of ranks. "shards": each rank reads shards of its own, where the
    stream has `num_shards` and `shard`; less to read, but what is in a step depends on the number of ranks."""
    remove_unused_columns: bool = True
    """Drop columns of a dataset that the model's forward does not take."""

    __signature__ = _InitSignature()

    def __new__(cls: type[_Arguments], *args: Any, **kwargs: Any) -> _Arguments:
        # Before __init__, so that subclasses, whose __init__ is written by @dataclass, explain unknown names as well.
        accepted = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
            unknown = [name for name in kwargs if name not in accepted]
            if unknown:
                raise TypeError(unknown_names_message(cls.__name__, unknown, list(accepted)[1:]))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        values = normalise({each.name: getattr(self, each.name) for each in dataclasses.fields(TrainingArguments)})
        found = problems(values)
        if found:
            lines = "".join(f"\n  {problem}" for problem in found)
            raise ArgumentsError(f"{type(self).__name__} cannot hold together:{lines}")
        for name, value in values.items():
            setattr(self, name, value)

    # ---- derived: this process

    @property
    def world_size(self) -> int:
        """Number of ranks of the job, as the launcher's variables say."""
        return _environment().world_size

    @property
    def process_index(self) -> int:
        """This process's rank in the job."""
        return _environment().rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its host."""
        return _environment().local_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its host; -1 where nobody launched it, as in Hugging Face."""
        environment = _environment()
        return environment.local_rank if environment.is_launched else -1

    @property
    def should_log(self) -> bool:
        """Whether this process shows logs: rank 0 does."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes the files that all ranks share: rank 0 does."""
        return self.process_index == 0

    # ---- derived: sizes, times, steps

    @property
    def train_batch_size(self) -> int:
        """Samples of one micro-batch on one rank."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples of one batch on one rank in evaluation."""
        return self.per_device_eval_batch_size

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as a time span."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def recompute_activations(self) -> bool:
        """Whether activations are recomputed in backward, under either of the two names."""
        newer, older = self.activation_checkpointing, self.gradient_checkpointing
        return bool(older if newer is None else newer)

    @property
    def recompute_kwargs(self) -> dict[str, Any]:
        """Settings of the recomputation, under either of the two names."""
        newer, older = self.activation_checkpointing_kwargs, self.gradient_checkpointing_kwargs
        return dict((older if newer is None else newer) or {})  # type: ignore[arg-type]  # JSON became a dict when checked

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of warm-up in a run of `num_training_steps` optimizer steps."""
        return _steps(self.warmup_steps, num_training_steps)

    def get_interval(self, event: Literal["logging", "eval", "save"], num_training_steps: int) -> int:
        """Optimizer steps between two events of a kind, in a run of `num_training_steps`; at least 1."""
        every: int | float | None = getattr(self, f"{event}_steps")
        return max(1, _steps(self.logging_steps if every is None else every, num_training_steps))

    # ---- to and from text

    def to_dict(self) -> dict[str, Any]:
        """Every field and its value, copied; enums as their values."""
        return {each.name: _plain(getattr(self, each.name)) for each in dataclasses.fields(self) if each.init}

    def to_json_string(self) -> str:
        """Every field as JSON, in the order in which they are declared."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    @classmethod
    def from_json(cls: type[_Arguments], path_or_text: str | os.PathLike[str]) -> _Arguments:
        """Read arguments from a JSON file, or from JSON text (which begins with a brace).

        Raises:
            ArgumentsError: text that is not a JSON object, or values that cannot hold together.
            TypeError: a name that is not an argument.
        """
        source = os.fspath(path_or_text)
        is_text = source.lstrip().startswith("{")
        try:
            values = json.loads(source if is_text else Path(source).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ArgumentsError(f"{'The text' if is_text else source} is not JSON: {error}.") from None
        if not isinstance(values, dict):
            raise ArgumentsError(f"{source} holds a JSON {type(values).__name__}; expected an object of names and values.")
        return cls(**values)


def _environment() -> WorkerEnvironment:
    return WorkerEnvironment.from_variables(os.environ)


def _steps(number: int | float, total: int) -> int:
    # Fraction of the digits as written: in floating point a tenth of 30 steps would round up to 4.
    return int(number) if number >= 1 else math.ceil(Fraction(repr(number)) * total)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else copy.deepcopy(value)
