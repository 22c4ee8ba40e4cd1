"""The part of a Trainer that writes: the model, checkpoints, the state, metrics; open to be overridden."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allstep import __version__
from allstep.checkpoint.manager import CheckpointManager
from allstep.checkpoint.state import TrainState
from allstep.checkpoint.weights import write_pretrained, write_weights, writes_itself
from allstep.report.model_card import model_card
from allstep.report.results import metrics_format, metrics_table, save_metrics
from allstep.trainer import loop
from allstep.trainer.saving import Saver
from allstep.trainer.surface.base import TrainerBase

__all__ = ["KeepingTrainer"]


class KeepingTrainer(TrainerBase):
    """Writes what is to be kept. See `Trainer` for the arguments."""

    _saver: Saver | None = None  # of the run that trains, or did last
    _is_writing = False  # a checkpoint's or model's folder is being filled; what ranks but 0 write is thrown away

    def save_model(self, output_dir: str | os.PathLike[str] | None = None, _internal_call: bool = False) -> None:
        """Collective. Write the model, and the tokenizer if there is one, as files that `from_pretrained` reads.

        Override it, or `_save`, for another way: checkpoints are then written that way too. An override of this is called on
        all ranks, one of `_save` on rank 0; what counts is what rank 0 writes.

        Args:
            output_dir: where to; None is `args.output_dir`.
            _internal_call: for overrides that were written for transformers: whether a checkpoint is being written.
        """
        if self._is_writing:
            if self.is_world_process_zero():
                self._save(output_dir)
            return
        checkpoints = CheckpointManager(self._output_dir, self.communicator)
        state = TrainState(model=self.model, processing_class=self.processing_class, write_model=self._own_way(of_model=True))
        checkpoints.save_model(state, output_dir)

    def _save(self, output_dir: str | os.PathLike[str] | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model and the tokenizer into a folder, on this rank; override for another way.

        Args:
            output_dir: where to; None is `args.output_dir`.
            state_dict: weights in place of the model's, for a model that has `save_pretrained`.
        """
        folder = self._output_dir if output_dir is None else Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if state_dict is not None and writes_itself(self.model):
            self.model.save_pretrained(folder, state_dict=state_dict)  # type: ignore[operator]  # it is there
        else:
            write_weights(self.model, folder)
        if writes_itself(self.processing_class):
            write_pretrained(self.processing_class, folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None, metrics: Any = None) -> None:
        """Collective. Write a checkpoint of where the run stands; override to write more, or something else.

        Args:
            model: the model, wrapped.
            trial: None; there is no search of hyper-parameters here.
            metrics: None; overrides from older scripts hand it on.
        """
        assert self.last_run is not None
        assert self._saver is not None
        loop.save(self.last_run, self._saver)

    def _get_output_dir(self, trial: Any = None) -> str:
        """The folder that checkpoints lie in."""
        return str(self._output_dir)

    def save_state(self) -> None:
        """Write `trainer_state.json` into `output_dir`, on rank 0."""
        if self.is_world_process_zero():
            self._output_dir.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(self._output_dir / "trainer_state.json")

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Show metrics as a table, on rank 0.

        Args:
            split: what they are of: "train", "eval", "test".
            metrics: as `train`, `evaluate` and `predict` give them.
        """
        if self.is_world_process_zero():
            print(metrics_table(split, metrics), flush=True)  # noqa: T201 - whoever calls it wants to see them

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to `{split}_results.json` and, with `combined`, into `all_results.json` of `output_dir`, on rank 0."""
        if self.is_world_process_zero():
            save_metrics(self._output_dir, split, metrics, combined)

    @staticmethod
    def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics as people read them, name by name."""
        return metrics_format(metrics)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write README.md into `output_dir`, on rank 0: what was trained, how, and the numbers of its last evaluation."""
        if not self.is_world_process_zero():
            return
        history = self.state.log_history
        last = next((entry for entry in reversed(history) if any(key.startswith("eval_") for key in entry)), None)
        last = last or next((entry for entry in reversed(history) if "train_loss" in entry), {})
        text = model_card(
            model_name or self._output_dir.name,
            self.args.to_dict(),
            {key: value for key, value in last.items() if key != "step"},
            {"allstep": __version__, "torch": torch.__version__},
            world_size=self.state.world_size,
            global_batch_size=self.state.global_batch_size,
            about={
                "language": language,
                "license": license,
                "tags": tags,
                "finetuned_from": finetuned_from,
                "tasks": tasks,
                "dataset_tags": dataset_tags,
                "dataset": dataset or dataset_args or dataset_tags,
            },
        )
        self._output_dir.mkdir(parents=True, exist_ok=True)
        (self._output_dir / "README.md").write_text(text, encoding="utf-8")

    def push_to_hub(self, *args: Any, **kwargs: Any) -> None:
        """Not there.

        Raises:
            NotImplementedError: always, with the way out.
        """
        raise NotImplementedError("Nothing is uploaded from here: save_model(), and upload output_dir with huggingface_hub.")

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> None:
        """Not there.

        Raises:
            NotImplementedError: always, with the way out.
        """
        raise NotImplementedError("There is no search of hyper-parameters: make a Trainer for each trial, with model_init.")

    def _checkpoint(self) -> None:
        """Collective. `_save_checkpoint`, for the loop; a checkpoint that is not ours is on disk when it returns."""
        assert self.last_run is not None
        assert self._saver is not None
        before = self._saver.calls
        takes_trial = len(inspect.signature(self._save_checkpoint).parameters) > 1
        self._save_checkpoint(self.last_run.model, *([None] if takes_trial else []))
        if self._saver.calls == before:
            self.callback_handler.call("on_save")

    def _own_way(self, *, of_model: bool = False) -> Callable[[Path], object] | None:
        """The user's way to write a model into a folder, an override of `_save` or of `save_model`; None where there is none.

        With `of_model`, `save_model` has been called already.
        """
        if self._has_own_save_model and not of_model:
            internal = "_internal_call" in inspect.signature(self.save_model).parameters
            return self._written(lambda folder: self.save_model(str(folder), **({"_internal_call": True} if internal else {})))
        if getattr(self._save, "__func__", None) is not KeepingTrainer._save:
            return self._written(lambda folder: self._save(str(folder)))
        return None

    @property
    def _has_own_save_model(self) -> bool:
        return getattr(self.save_model, "__func__", None) is not KeepingTrainer.save_model

    def _written(self, write: Callable[[Path], object]) -> Callable[[Path], object]:
        def run(folder: Path) -> None:
            self._is_writing = True
            try:
                write(folder)
            finally:
                self._is_writing = False

        return run
