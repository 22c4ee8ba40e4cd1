"""Trackers: TensorBoard, Weights & Biases, MLflow and Trackio, each one run for one job.

Their packages are optional, and loaded when training begins. Which run of a tracker a job has is kept in
`trackers.json` in the output folder, so that a job that is started again after a failure, or resumed from a checkpoint, goes
on in that run. What a tracker raises ends the tracker, not the training (`SinkGroup`).
"""

import importlib
import importlib.util
import json
import os
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from allstep.errors import ArgumentsError
from allstep.report.record import StepRecord, json_line
from allstep.report.sink import RunFacts, Sink

__all__ = [
    "TRACKERS",
    "TRACKERS_FILE",
    "MlflowSink",
    "TensorBoardSink",
    "TrackerSink",
    "TrackioSink",
    "WandbSink",
    "make_trackers",
]

TRACKERS_FILE = "trackers.json"
"""Name of the file inside the output folder that says which run of each tracker is this job's."""

_OF_THE_RUN = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
"""Numbers that a run has once, at its end."""


class TrackerSink(Sink):
    """One run of a tracker. It begins with training, or the first numbers; the tracker ends it with the process.

    Args:
        output_dir: where `trackers.json` lies.
        facts: what the run is; asked for when it begins.
        is_restarted: whether the launcher has started this job again after a failure.
    """

    name: ClassVar[str]
    """What `report_to` calls it, and its package."""
    failures = (Exception,)

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        facts: Callable[[], RunFacts] = RunFacts,
        is_restarted: bool = False,
    ) -> None:
        self.output_dir = Path(output_dir)
        """The run's output folder."""
        self._facts, self._goes_on = facts, is_restarted
        self._is_begun = False
        self._first_step: int | None = None  # while training
        self._id: str | None = None

    def open(self, total_steps: int | None, first_step: int) -> None:
        self._first_step, self._goes_on = first_step, self._goes_on or first_step > 0
        self._begin_once()  # not at the first log: importing a tracker takes longer than many steps

    def step(self, record: StepRecord) -> None:
        """Nothing: it shows what is logged."""

    def log(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        self._begin_once()
        self._log({**values, "epoch": epoch}, step)

    def message(self, text: str) -> None:
        """Nothing: it shows numbers."""

    def close(self) -> None:
        self._first_step = None

    def _begin_once(self) -> None:
        if not self._is_begun:
            if self._id is None and self._goes_on:
                self._id = _kept(self.output_dir).get(self.name)
            self._id = self._begin(self._facts(), self._id)
            self._is_begun = True
            self._keep(self._id)

    @abstractmethod
    def _begin(self, facts: RunFacts, id: str | None) -> str:
        """Begin a run, or go on with the one called `id`; what it is called."""

    @abstractmethod
    def _log(self, values: Mapping[str, Any], step: int) -> None:
        """Show numbers of a step."""

    def _keep(self, id: str) -> None:
        """Write down what the run is called; an evaluation on its own does not take the place of a training."""
        kept = _kept(self.output_dir)
        if kept.get(self.name) == id or (self.name in kept and self._first_step is None):
            return
        self.output_dir.mkdir(parents=True, exist_ok=True)
        beside = self.output_dir / f"{TRACKERS_FILE}.new"
        beside.write_text(json.dumps(kept | {self.name: id}) + "\n", encoding="utf-8")
        beside.replace(self.output_dir / TRACKERS_FILE)


class TensorBoardSink(TrackerSink):
    """Scalars below `runs/` in the output folder, a folder for each run: train/loss, train/learning_rate, eval/loss.

    TENSORBOARD_LOGGING_DIR names another folder. Points of steps that a resumed run does again are taken back.
    """

    name = "tensorboard"
    _writer: Any = None

    def _begin(self, facts: RunFacts, id: str | None) -> str:
        from torch.utils.tensorboard import SummaryWriter  # the package is optional

        given = os.environ.get("TENSORBOARD_LOGGING_DIR")
        folder = given or id or str(self.output_dir / "runs" / f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}")
        again = self._first_step + 1 if self._first_step is not None and self._goes_on else None
        self._writer = SummaryWriter(folder, purge_step=again)
        if id is None:
            self._writer.add_text("args", json_line(facts.arguments))
            if facts.model:
                self._writer.add_text("model_config", json_line(facts.model))
        return folder

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        for name, value in _tagged(values).items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
            elif isinstance(value, str):
                self._writer.add_text(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        super().close()
        self._is_begun, writer, self._writer = False, self._writer, None
        if writer is not None:
            writer.close()


class WandbSink(TrackerSink):
    """A run of Weights & Biases, in the project WANDB_PROJECT; or the one that the script has begun itself."""

    name = "wandb"
    _run: Any = None

    def _begin(self, facts: RunFacts, id: str | None) -> str:
        wandb = importlib.import_module("wandb")
        resumed = {} if id is None or "WANDB_RUN_ID" in os.environ else {"id": id, "resume": "allow"}
        project = os.environ.get("WANDB_PROJECT") or facts.arguments.get("project") or "huggingface"
        self._run = wandb.run or wandb.init(project=project, name=facts.name, **resumed)
        self._run.config.update(json.loads(json_line(facts.config)), allow_val_change=True)
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step", step_sync=True)
        return str(self._run.id)

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        for name in _OF_THE_RUN:
            if name in values:
                self._run.summary[name] = values[name]
        others = {name: value for name, value in values.items() if name not in _OF_THE_RUN}
        self._run.log({**_tagged(others), "train/global_step": step})


class MlflowSink(TrackerSink):
    """A run of MLflow, where MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say, or the one that the script has begun."""

    name = "mlflow"
    _client: Any = None

    def _begin(self, facts: RunFacts, id: str | None) -> str:
        mlflow = importlib.import_module("mlflow")
        active = mlflow.active_run()
        if active is None:
            resumed = {} if id is None or "MLFLOW_RUN_ID" in os.environ else {"run_id": id}
            active = mlflow.start_run(run_name=facts.name, **resumed)
        self._client = mlflow
        if id is None:  # parameters of a run cannot be changed
            limits = mlflow.utils.validation
            shown = {name: str(value) for name, value in facts.config.items()}
            fitting = [each for each in shown.items() if len(each[1]) <= limits.MAX_PARAM_VAL_LENGTH]
            for at in range(0, len(fitting), limits.MAX_PARAMS_TAGS_PER_BATCH):
                mlflow.log_params(dict(fitting[at : at + limits.MAX_PARAMS_TAGS_PER_BATCH]))
        return str(active.info.run_id)

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        numbers = {_allowed(name): value for name, value in values.items() if isinstance(value, int | float)}
        self._client.log_metrics(numbers, step=step, run_id=self._id, synchronous=False)

    def close(self) -> None:
        super().close()
        if self._client is not None:
            self._client.flush_async_logging()  # what is under way when the process ends is lost


class TrackioSink(TrackerSink):
    """A run of Trackio, in the project that the arguments name; on this machine, unless they name a Space."""

    name = "trackio"
    _run: Any = None

    def _begin(self, facts: RunFacts, id: str | None) -> str:
        trackio, given = importlib.import_module("trackio"), facts.arguments
        options = {"space_id": given.get("trackio_space_id"), "bucket_id": given.get("trackio_bucket_id")}
        self._run = trackio.init(
            project=given.get("project") or "huggingface",
            name=id or facts.name,
            resume="never" if id is None else "allow",
            config=json.loads(json_line(facts.config)),
            embed=False,
            **{name: value for name, value in options.items() if value is not None},
        )
        return str(self._run.name)

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log({**_tagged(values), "train/global_step": step})


TRACKERS: Mapping[str, type[TrackerSink]] = {each.name: each for each in (TensorBoardSink, WandbSink, MlflowSink, TrackioSink)}
"""What `report_to` may name -> the sink."""


def make_trackers(
    report_to: str | Sequence[str] | None,
    output_dir: str | os.PathLike[str],
    facts: Callable[[], RunFacts] = RunFacts,
    is_restarted: bool = False,
) -> list[TrackerSink]:
    """The trackers that `report_to` names; "all": those that are installed. Nothing is begun.

    Raises:
        ArgumentsError: it names something unknown, or a package that is not installed.
    """
    names = {report_to} if isinstance(report_to, str) else set(report_to or ())
    problems = [_unknown(name) for name in sorted(names - {"all", "none", *TRACKERS})]
    problems += [_missing(name) for name in TRACKERS if name in names and not _is_installed(name)]
    if problems:
        raise ArgumentsError("\n".join(problems))
    wanted = [name for name in TRACKERS if name in names or ("all" in names and _is_installed(name))]
    return [TRACKERS[name](output_dir, facts, is_restarted) for name in wanted]


def _unknown(name: str) -> str:
    return (
        f"report_to={name!r}: there are {', '.join(TRACKERS)}, all (what is installed) and none. For another tracker, pass "
        f"Trainer(callbacks=[...]) one that logs to it, such as Hugging Face's in transformers.integrations."
    )


def _missing(name: str) -> str:
    package = "allstep[tensorboard]" if name == "tensorboard" else name
    return (
        f"report_to={name!r} needs the package {name}, which is not installed. Install it with `pip install '{package}'`, or "
        f"set report_to='none'; metrics.jsonl is written in either case."
    )


def _is_installed(name: str) -> bool:
    """Whether a package is there; a folder of that name, such as the `wandb` that wandb writes itself, is none."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


def _kept(output_dir: Path) -> dict[str, str]:
    try:
        kept = json.loads((output_dir / TRACKERS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or cut off
        return {}
    return kept if isinstance(kept, dict) else {}


def _tagged(values: Mapping[str, Any]) -> dict[str, Any]:
    """`eval_loss` as `eval/loss`, `loss` as `train/loss`: trackers put what is before the slash under one heading."""
    return {_tag(name): value for name, value in values.items()}


def _tag(name: str) -> str:
    for part in ("eval", "test"):  # not "train": the train_loss of the whole run is another curve than loss
        if name.startswith(f"{part}_"):
            return f"{part}/{name.removeprefix(f'{part}_')}"
    return f"train/{name}"


def _allowed(name: str) -> str:
    """A name of which MLflow takes every letter."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_-. :/") else "_" for letter in name)
