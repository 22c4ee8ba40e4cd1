"""`Seq2SeqTrainingArguments`: what models that generate are evaluated by, beside all that TrainingArguments has."""

from dataclasses import dataclass
from typing import Any

from allstep.arguments import TrainingArguments

__all__ = ["Seq2SeqTrainingArguments"]


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    """TrainingArguments, and how to generate in evaluation and prediction. Names and meanings are Hugging Face's."""

    sortish_sampler: bool = False
    """Put samples of like length together: the older way to say `train_sampling_strategy="group_by_length"`."""
    predict_with_generate: bool = False
    """Generate tokens in evaluation and prediction, and hand those to `compute_metrics` in place of logits."""
    generation_max_length: int | None = None
    """Most tokens to generate. None: what the model's generation configuration says."""
    generation_num_beams: int | None = None
    """Beams of the search. None: what the model's generation configuration says."""
    generation_config: Any = None
    """A `transformers.GenerationConfig`, or the path of one, in place of the model's."""

    def __post_init__(self) -> None:
        if self.sortish_sampler and self.train_sampling_strategy == "random":
            self.train_sampling_strategy = "group_by_length"
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """Every field and its value, copied; a generation configuration as the dictionary of its own."""
        config = self.generation_config
        return {**super().to_dict(), "generation_config": config.to_dict() if hasattr(config, "to_dict") else config}
