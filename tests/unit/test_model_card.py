"""A model card holds what was trained, how, and how well."""

import pytest

from allstep.report.model_card import model_card
from allstep.testing.models import Regression, RegressionNet

yaml = pytest.importorskip("yaml", reason="reads the front of the card")


def card(**about):
    return model_card(
        "tiny",
        {"learning_rate": 3e-4, "seed": 1, "output_dir": "private"},
        {"eval_loss": 0.123456789, "epoch": 2.0},
        {"torch": "2"},
        world_size=2,
        global_batch_size=16,
        about=about,
    )


def test_everything_that_is_said_is_in_it():
    text = card(license="mit", language=["en", "zh"], finetuned_from="base: small", tasks="classification", dataset="words")
    _, front, body = text.split("---\n", 2)
    read = yaml.safe_load(front)
    assert read == {
        "library_name": "allstep",
        "model_name": "tiny",
        "license": "mit",
        "base_model": "base: small",
        "language": ["en", "zh"],
    }
    assert "Fine-tuned from base: small on words for classification." in body
    for row in ("eval_loss | 0.123457", "learning_rate | 0.0003", "ranks | 2", "global batch | 16", "torch | 2"):
        assert f"| {row} |" in body
    assert "private" not in text


def test_what_is_not_said_leaves_no_hole():
    text = card(license=None, tags="regression")
    assert yaml.safe_load(text.split("---\n")[1])["tags"] == ["regression"]
    assert "None" not in text
    assert "\nTrained.\n" in text


def test_a_trainer_writes_it_and_says_what_it_does_not_do(tmp_path):
    import pytest

    from allstep import Trainer, TrainingArguments

    args = TrainingArguments(str(tmp_path / "tiny"), max_steps=1, eval_strategy="epoch", save_strategy="no", disable_tqdm=True)
    trainer = Trainer(RegressionNet(), args, train_dataset=Regression(8), eval_dataset=Regression(4))
    trainer.train()
    trainer.create_model_card(finetuned_from="nothing", dataset_tags=["made-up"])
    text = (tmp_path / "tiny" / "README.md").read_text()
    assert text.count("eval_loss") == 1
    assert "# tiny" in text
    with pytest.raises(NotImplementedError, match="upload output_dir"):
        trainer.push_to_hub()
    with pytest.raises(NotImplementedError, match="for each trial"):
        trainer.hyperparameter_search(n_trials=3)
