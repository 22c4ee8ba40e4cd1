"""`Seq2SeqTrainer`: a Trainer whose evaluation generates, for translation, summaries and the like. It needs transformers."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from allstep.arguments import TrainingArguments
from allstep.arguments_seq2seq import Seq2SeqTrainingArguments
from allstep.errors import ArgumentsError
from allstep.trainer.evaluation.evaluate import PredictionOutput
from allstep.trainer.trainer import Trainer

__all__ = ["Seq2SeqTrainer"]


class Seq2SeqTrainer(Trainer):
    """A `Trainer`; with `predict_with_generate`, `evaluate` and `predict` generate tokens. Its arguments are the same."""

    _gen_kwargs: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed in place
    _is_evaluating = False  # several datasets, one after the other

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self._argument("generation_config")
        if config is not None:
            self.model.generation_config = self.load_generation_config(config)

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """A `transformers.GenerationConfig`: a copy of the one given, or what a file or folder says.

        Raises:
            ArgumentsError: there is no such file or folder.
        """
        from transformers import GenerationConfig  # it comes with the models that generate

        if isinstance(gen_config_arg, GenerationConfig):
            return GenerationConfig.from_dict(gen_config_arg.to_dict())
        path = Path(gen_config_arg)
        if path.is_file():
            return GenerationConfig.from_pretrained(str(path.parent), config_file_name=path.name)
        if not path.is_dir():
            raise ArgumentsError(
                f"generation_config={str(gen_config_arg)!r}: expected a GenerationConfig, or its file or folder."
            )
        return GenerationConfig.from_pretrained(str(path))

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Collective. As `Trainer.evaluate`; `gen_kwargs` go to the model's `generate`."""
        is_one_of_several, self._is_evaluating = self._is_evaluating, True
        if not is_one_of_several:
            self._gen_kwargs = self._complete(gen_kwargs)
        try:
            return super().evaluate(eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)
        finally:
            self._is_evaluating = is_one_of_several

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Collective. As `Trainer.predict`; `gen_kwargs` go to the model's `generate`."""
        self._gen_kwargs = self._complete(gen_kwargs)
        return super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """(mean loss, generated tokens, labels) of a batch; without `predict_with_generate` as `Trainer` has it.

        Tokens and labels shorter than the longest that may be generated are filled up with the padding token.
        """
        if not self._argument("predict_with_generate") or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        loss = super().prediction_step(model, inputs, True)[0] if "labels" in inputs else None
        inputs = self._prepare_inputs(inputs)
        settings = {
            name: value for name, value in (gen_kwargs or self._complete(self._gen_kwargs)).items() if value is not None
        }
        generator: Any = model
        tokens = generator.generate(**_to_generate_from(inputs), **settings)
        longest = _longest(settings, generator.generation_config)
        return loss, self._filled(tokens, longest), self._filled(inputs.get("labels"), longest)

    def _complete(self, given: dict[str, Any]) -> dict[str, Any]:
        """Settings of `generate`: those given, else those of the arguments."""
        settings, longest, beams = dict(given), self._argument("generation_max_length"), self._argument("generation_num_beams")
        if settings.get("max_length") is None and settings.get("max_new_tokens") is None and longest is not None:
            settings["max_length"] = longest
        if settings.get("num_beams") is None and beams is not None:
            settings["num_beams"] = beams
        return settings

    def _argument(self, name: str) -> Any:
        args: TrainingArguments | Seq2SeqTrainingArguments = self.args
        return getattr(args, name, None)

    def _filled(self, tokens: torch.Tensor | None, longest: int) -> torch.Tensor | None:
        if tokens is None or tokens.shape[-1] >= longest:
            return tokens
        filled = tokens.new_full((tokens.shape[0], longest), self._padding())
        filled[:, : tokens.shape[-1]] = tokens
        return filled

    def _padding(self) -> int:
        owners = (self.processing_class, getattr(self.model, "generation_config", None), getattr(self.model, "config", None))
        for owner in owners:
            for name in ("pad_token_id", "eos_token_id"):
                value = getattr(owner, name, None)
                if isinstance(value, int):
                    return value
        raise ArgumentsError(
            f"predict_with_generate needs a padding token: found none in the processing_class and in the configuration of "
            f"{type(self.model).__name__}. Set model.config.pad_token_id."
        )


def _to_generate_from(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs without labels, and without decoder inputs that were made of them, from which the model would go on."""
    made_of_labels = "labels" in inputs and "decoder_input_ids" in inputs
    if made_of_labels and inputs["labels"].shape == inputs["decoder_input_ids"].shape:
        return {
            key: value for key, value in inputs.items() if key not in ("labels", "decoder_input_ids", "decoder_attention_mask")
        }
    return {key: value for key, value in inputs.items() if key != "labels"}


def _longest(settings: dict[str, Any], config: Any) -> int:
    """The longest row that may be generated; 0 where nothing says it."""
    more = settings.get("max_new_tokens") or (None if settings.get("max_length") else getattr(config, "max_new_tokens", None))
    return more + 1 if more else settings.get("max_length") or getattr(config, "max_length", None) or 0
