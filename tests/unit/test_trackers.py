"""Trackers: one run for one job, told what it is, and dropped when it fails."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from allstep._arguments.choices import TRACKERS as NAMES
from allstep.arguments import TrainingArguments
from allstep.errors import ArgumentsError
from allstep.report import trackers as module
from allstep.report.sink import RunFacts
from allstep.report.sinks import make_sinks
from allstep.report.trackers import TRACKERS, TensorBoardSink, make_trackers

FACTS = RunFacts(
    name="my run",
    arguments={"learning_rate": 0.1, "report_to": ["x"], "seed": 7},
    model={"hidden_size": 8, "seed": 1},
    parameters=99,
)


def needs(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the package {name} is not installed")
    return importlib.import_module(name)


def test_there_is_a_class_for_every_name_that_arguments_take() -> None:
    assert tuple(TRACKERS) == NAMES


@pytest.mark.parametrize("report_to", ["comet_ml", ["tensorboard", "comet_ml"]])
def test_an_unknown_tracker_is_an_error_that_says_what_to_pass(report_to: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentsError, match=r"'comet_ml': there are tensorboard, wandb, mlflow, trackio, all .*callbacks=\["):
        make_trackers(report_to, tmp_path)


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize(("name", "package"), [("tensorboard", r"'allstep\[tensorboard\]'"), ("wandb", "'wandb'")])
def test_a_tracker_that_is_not_installed_is_an_error_on_every_rank(
    name: str, package: str, is_main: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_installed", lambda name: False)
    with pytest.raises(ArgumentsError, match=f"{name} is not installed|needs the package {name}.*pip install {package}"):
        make_sinks(tmp_path, name, is_main)
    assert make_trackers("all", tmp_path) == []


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflowish").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("mlflowish") is not None
    assert not module._is_installed("mlflowish")


def test_facts_are_those_of_arguments_and_model() -> None:
    import torch

    model = torch.nn.Linear(3, 2)
    assert RunFacts.of(TrainingArguments(run_name="x"), model).parameters == 8
    model.config = types.SimpleNamespace(to_dict=lambda: {"hidden_size": 3, "learning_rate": "the model's"})
    facts = RunFacts.of(TrainingArguments(run_name="x", learning_rate=0.5), model)
    assert (facts.name, facts.model["hidden_size"], facts.config["learning_rate"]) == ("x", 3, 0.5)
    assert facts.config["model/num_parameters"] == 8


# ---- fakes: what is called


class Fake(types.ModuleType):
    """Stands for a tracker's package, and keeps the runs that were begun."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.runs: list[Any] = []
        self.run: Any = None

    def init(self, **options: Any) -> Any:
        run = types.SimpleNamespace(
            id=options.get("id") or f"new-{len(self.runs)}",
            name=options.get("name"),
            options=options,
            config={},
            summary={},
            logged=[],
            define_metric=lambda *_, **__: None,
        )
        run.config = types.SimpleNamespace(update=lambda values, allow_val_change: run.options.update(config=values))
        run.log = run.logged.append
        self.runs.append(run)
        return run


@pytest.fixture
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake(request.param)
    monkeypatch.setitem(sys.modules, request.param, fake)
    monkeypatch.setattr(module, "_is_installed", lambda name: True)
    for name in ("WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return fake


def tracker(name: str, folder: Path, **options: Any) -> Any:
    (sink,) = make_trackers([name], folder, lambda: FACTS, **options)
    return sink


both = pytest.mark.parametrize("fake", ["wandb", "trackio"], indirect=True)


@both
def test_a_run_is_begun_once_and_told_what_it_is(fake: Fake, tmp_path: Path) -> None:
    sink = tracker(fake.__name__, tmp_path)
    sink.open(10, 0)
    sink.log({"loss": 1.5, "eval_loss": 2.5, "test_f1": 0.5, "evaluated": 1, "train_rate": 2.0}, 7, 0.7)
    sink.close()
    sink.log({"eval_loss": 2.0}, 10, 1.0)  # an evaluation afterwards
    (run,) = fake.runs
    assert (run.options["project"], run.options["name"]) == ("huggingface", "my run")
    assert run.options["config"] == {
        "hidden_size": 8,
        "seed": 7,
        "learning_rate": 0.1,
        "report_to": ["x"],
        "model/num_parameters": 99,
    }
    assert run.logged == [
        {
            "train/loss": 1.5,
            "eval/loss": 2.5,
            "test/f1": 0.5,
            "train/evaluated": 1,
            "train/train_rate": 2.0,
            "train/epoch": 0.7,
            "train/global_step": 7,
        },
        {"eval/loss": 2.0, "train/epoch": 1.0, "train/global_step": 10},
    ]


@both
@pytest.mark.parametrize(("first_step", "is_restarted"), [(5, False), (0, True)])
def test_a_job_that_goes_on_goes_on_in_its_run(fake: Fake, first_step: int, is_restarted: bool, tmp_path: Path) -> None:
    tracker(fake.__name__, tmp_path).open(10, 0)
    tracker(fake.__name__, tmp_path, is_restarted=is_restarted).open(10, first_step)
    tracker(fake.__name__, tmp_path).open(10, 0)
    first, again, another = fake.runs
    key = "id" if fake.__name__ == "wandb" else "name"
    assert again.options["resume"] == "allow"
    assert again.options[key] == getattr(first, key)
    assert another.options.get("resume", "never") == "never"
    assert another.options.get("id") is None


@pytest.mark.parametrize("fake", ["wandb"], indirect=True)
def test_an_evaluation_on_its_own_does_not_take_the_place_of_a_training(fake: Fake, tmp_path: Path) -> None:
    tracker("wandb", tmp_path).open(10, 0)
    kept = (tmp_path / "trackers.json").read_text()
    tracker("wandb", tmp_path).log({"eval_loss": 2.0}, 10, 1.0)
    assert len(fake.runs) == 2
    assert (tmp_path / "trackers.json").read_text() == kept == '{"wandb": "new-0"}\n'


@pytest.mark.parametrize("fake", ["wandb"], indirect=True)
def test_numbers_of_the_whole_run_and_a_run_of_the_users_own(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    fake.run = fake.init(project="begun by the script")
    sink = tracker("wandb", tmp_path)
    sink.open(10, 0)
    sink.log({"train_runtime": 3.0, "train_loss": 1.0}, 10, 1.0)
    assert fake.runs == [fake.run]
    assert fake.run.summary == {"train_runtime": 3.0, "train_loss": 1.0}
    assert fake.run.logged == [{"train/epoch": 1.0, "train/global_step": 10}]


@pytest.mark.parametrize("fake", ["trackio"], indirect=True)
def test_a_tracker_that_fails_is_dropped_with_one_warning(fake: Fake, tmp_path: Path) -> None:
    def refuse(**options: Any) -> None:
        raise RuntimeError("no such project")

    fake.init = refuse  # type: ignore[method-assign]
    group = make_sinks(tmp_path, "trackio")
    with pytest.warns(UserWarning, match=r"TrackioSink shows nothing .*: no such project\. Training goes on\."):
        group.open(10, 0)
    group.log({"loss": 1.0}, 1, 0.1)
    group.close()
    assert (tmp_path / "metrics.jsonl").exists()


# ---- the packages themselves, without a network


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> steps and values, as TensorBoard would show them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    found: dict[str, Any] = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return found | {"texts": sorted(events.Tags()["tensors"])}


def test_tensorboard_shows_one_run_without_what_was_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("tensorboard")
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    sink = tracker("tensorboard", tmp_path)
    assert isinstance(sink, TensorBoardSink)
    sink.open(10, 0)
    for step in (2, 4, 6):
        sink.log({"loss": step / 2, "note": "x"}, step, 0.1)
    sink.close()
    again = tracker("tensorboard", tmp_path)
    again.open(10, 4)
    again.log({"loss": 30.0}, 6, 0.6)
    again.close()
    again.log({"eval_loss": 1.5}, 6, 0.6)
    again.close()
    (folder,) = (tmp_path / "runs").iterdir()
    shown = points(folder)
    assert shown["train/loss"] == [(2, 1.0), (4, 2.0), (6, 30.0)]
    assert shown["eval/loss"] == [(6, 1.5)]
    assert shown["texts"] == ["args/text_summary", "model_config/text_summary", "train/note/text_summary"]


def test_tensorboard_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "elsewhere"))
    sink = tracker("tensorboard", tmp_path)
    sink.open(10, 0)
    sink.close()
    assert list((tmp_path / "elsewhere").glob("events.out.*"))


TWICE = """
import sys
from pathlib import Path

from allstep.report.sink import RunFacts
from allstep.report.trackers import make_trackers

(sink,) = make_trackers(sys.argv[1], Path.cwd(), lambda: RunFacts(name="my run", arguments={"seed": 7}, model={"size": 8}))
first_step = int(sys.argv[2])
sink.open(10, first_step)
sink.log({"loss": 1.5 + first_step, "odd name!": 1, "train_loss": 2.5}, first_step + 4, 0.5)
sink.close()
"""
"""A training that logs once."""


def trained(name: str, folder: Path, show: str) -> Any:
    """What `show` prints after a training, and another that goes on with it, each in a process of its own."""
    needs(name)
    own = {"WANDB_MODE": "offline", "TRACKIO_DIR": "trackio", "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}
    for program in ([TWICE, name, "0"], [TWICE, name, "4"], [show]):
        done = subprocess.run(
            [sys.executable, "-c", *program], cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_mlflow_shows_one_run(tmp_path: Path) -> None:
    show = """
import json, mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
losses = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")]
print(json.dumps([run.info.run_name, run.info.status, run.data.params, losses, run.data.metrics["odd name_"]]))
"""
    name, status, parameters, losses, odd = trained("mlflow", tmp_path, show)
    assert (name, status, odd) == ("my run", "FINISHED", 1)
    assert parameters == {"seed": "7", "size": "8"}
    assert losses == [[4, 1.5], [8, 5.5]]


def test_wandb_keeps_its_id(tmp_path: Path) -> None:
    show = """
import glob, json
print(json.dumps(sorted(glob.glob("wandb/offline-run-*/*.wandb"))))
"""
    files = trained("wandb", tmp_path, show)
    id = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    assert [Path(file).name for file in files] == 2 * [f"run-{id}.wandb"], "sent later, they are one run"


def test_trackio_shows_one_run(tmp_path: Path) -> None:
    show = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("huggingface")
logs = SQLiteStorage.get_logs("huggingface", run.name)
print(json.dumps([run.name, run.config, [[each["train/global_step"], each["train/loss"]] for each in logs]]))
"""
    name, config, losses = trained("trackio", tmp_path, show)
    assert name == "my run"
    assert (config["seed"], config["size"]) == (7, 8)
    assert losses == [[4, 1.5], [8, 5.5]]
