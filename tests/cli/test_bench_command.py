"""`allstep bench` with so little to do that its numbers say nothing: what it measures, what it writes, what it refuses."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from allstep.cli.bench import command, picture, startup, trainers
from allstep.cli.bench.programs.joining import group_of
from allstep.errors import BackendError

WRONG_BACKEND = """
    import torch.distributed as dist

    class Wrong(dist.ProcessGroup):
        '''gloo, but for one element of each sum on rank 1.'''

        def __init__(self, store, rank, size, timeout):
            super().__init__(rank, size)
            self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

        def getBackendName(self):
            return "wrong"

        def setGroupName(self, name):
            self.name_ = name

        def getGroupName(self):
            return self.name_

        def setGroupDesc(self, text):
            self.text_ = text

        def getGroupDesc(self):
            return self.text_

        def allreduce(self, tensors, options=None):
            work = self.gloo.allreduce(tensors, options or dist.AllreduceOptions())
            work.wait()
            if self.rank() == 1 and tensors[0].is_floating_point():
                tensors[0].view(-1)[3] += 1
            return work

        def broadcast(self, tensors, options):
            return self.gloo.broadcast(tensors, options)

        def allgather(self, outputs, inputs, options=None):
            return self.gloo.allgather(outputs, inputs, options or dist.AllgatherOptions())

        def barrier(self, opts=None):
            return self.gloo.barrier(opts or dist.BarrierOptions())

    dist.Backend.register_backend("wrong", Wrong, devices=["cpu"])
"""
LITTLE = ("--ranks", "2", "--seconds", "0.1", "--blocks", "1")
RATIO = {"value", "low", "high"}
STEPS = ("over_best", "gloo_over_best", "over_no_sync", "best_over_no_sync")


def refused(*arguments):
    """What the command said when it refused its arguments."""
    end = CliRunner().invoke(command.bench, arguments)
    assert end.exit_code == 2
    return end.output


# What runs ranks.


def test_all_reduce_gives_one_json_object_and_files_on_request(allstep, tmp_path):
    end = allstep(
        "bench",
        "allreduce",
        "--backend",
        "gloo",
        "--sizes",
        "4K,100",
        "--dtypes",
        "float32",
        *LITTLE,
        "--json",
        "--output",
        "o",
    )
    assert end.returncode == 0, end.stderr
    result = json.loads(end.stdout)
    assert (result["benchmark"], result["backend"], result["wrong"]) == ("allreduce", "gloo", [])
    assert [(row["ranks"], row["bytes"], row["dtype"]) for row in result["rows"]] == [(2, 4096, "float32"), (2, 100, "float32")]
    for row in result["rows"]:
        assert {"gloo", "any", "floor", "gloo in a row"} <= row["ms"].keys()
        assert min(row["ms"].values()) > 0
        assert row["speedup"]["any"].keys() == row["over_floor"]["any"].keys() == RATIO
        assert row["blocks"]["measured"] >= len(row["ms"])
    assert result["machine"].keys() >= {"processor", "cores", "python"}
    assert "gloo against gloo" in result["verdict"]
    assert json.loads((tmp_path / "o" / "allreduce.json").read_text()) == result
    assert result["verdict"].splitlines()[0] in (tmp_path / "o" / "allreduce.md").read_text()
    drawn = (tmp_path / "o" / "allreduce.png").exists()
    assert drawn == picture.is_available()


def test_a_wrong_sum_fails_the_command_and_says_what_differed(allstep, script):
    script(WRONG_BACKEND, "wrong_sums.py")
    end = allstep(
        "bench",
        "allreduce",
        "--backend",
        "wrong_sums:wrong",
        "--sizes",
        "4K",
        "--dtypes",
        "bfloat16",
        *LITTLE,
        PYTHONPATH=_path(),
    )
    assert end.returncode == 1, end.stderr
    where = "Error: all_reduce of 4096 bytes of bfloat16 on 2 ranks (any tensor): on rank 1, "
    assert f"{where}1 of 2048 elements are wrong; the first, element 3, is " in end.stderr
    assert "(gloo)" not in end.stderr
    assert "WRONG RESULTS" in end.stdout


@pytest.mark.long
def test_steps_are_compared_with_the_best_of_torch_and_with_no_synchronisation(allstep):
    end = allstep("bench", "ddp", "--backend", "gloo", "--models", "small", "--optimizers", "adamw", *LITTLE, "--json")
    assert end.returncode == 0, end.stderr
    result = json.loads(end.stdout)
    (row,) = result["rows"]
    assert (row["model"], row["optimizer"], row["ranks"], row["accumulation"]) == ("small", "adamw", 2, 1)
    assert row["parameters"] == "equal bits"
    assert len(row["ms"]) == 9
    assert row["best_torch"] in row["ms"]
    assert all(row[key].keys() == RATIO for key in STEPS)
    assert result["models"] == {"small": command.MODELS["small"]}


@pytest.mark.long
def test_wrong_gradients_fail_the_command_and_say_which_side(allstep, script):
    script(WRONG_BACKEND, "wrong_sums.py")
    end = allstep(
        *("bench", "ddp", "--backend", "wrong_sums:wrong", "--models", "small", "--optimizers", "sgd", *LITTLE),
        PYTHONPATH=_path(),
    )
    assert end.returncode == 1, end.stderr
    assert "small with sgd on 2 ranks: after" in end.stderr
    assert "the replicas of allstep's DDP differ between ranks 0 and 1" in end.stderr
    assert "allstep's DDP on gloo" not in end.stderr


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("glue", "--backend glue is not there. Write the name of a torch.distributed backend for the CPU, such as gloo or shm"),
        ("not_here:glue", "--backend not_here:glue: its module cannot be imported: No module named 'not_here'."),
    ],
)
def test_a_backend_that_is_not_there_is_told_with_what_to_write(backend, said):
    with pytest.raises(BackendError, match=re.escape(said)):
        group_of(backend)


@pytest.mark.long
def test_a_tiny_model_is_trained_under_the_trainer_and_in_a_bare_loop(allstep, tmp_path):
    end = allstep("bench", "trainer", "--ranks", "1", "--steps", "100", "--seconds", "0.1", "--blocks", "1", "--json")
    assert end.returncode == 0, end.stderr
    result = json.loads(end.stdout)
    (row,) = result["rows"]
    assert row["over_bare"].keys() == RATIO
    installed = importlib.util.find_spec("transformers") is not None
    assert (row["over_peer"] is not None) == installed
    assert ("transformers is not installed" in result["verdict"]) == (not installed)
    assert list(tmp_path.iterdir()) == [tmp_path / "temporary"]
    assert list((tmp_path / "temporary").glob("allstep*")) == []


def test_a_start_is_timed_from_the_command_to_the_sum(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for side in (startup.BARE, "allstep launch"):
        assert startup.once(side) > 0


# What does not.


def test_a_start_that_fails_is_an_error_with_its_last_lines(monkeypatch, tmp_path):
    failing = tmp_path / "failing.py"
    failing.write_text("raise SystemExit('rank 0 of 2: the sum is 1, not 3')")
    monkeypatch.setattr(startup, "SCRIPT", failing)
    with pytest.raises(click.ClickException, match=r"bare processes: the 2 ranks failed:\nrank 0 of 2: the sum is 1, not 3"):
        startup.once(startup.BARE)


def test_launchers_take_turns_and_the_slower_torchrun_leaves(monkeypatch):
    seconds = {"bare processes": 2.0, "allstep launch": 2.1, "torchrun --master-port": 3.0, "torchrun --standalone": 4.0}
    started = []
    monkeypatch.setattr(startup, "once", lambda side: started.append(side) or seconds[side])
    monkeypatch.setattr(startup, "import_time", lambda name, times: {"ms": 1.0, "loads_torch": name == "torch"})
    monkeypatch.setattr(startup.Patience, "wait", lambda self: None)
    end = CliRunner().invoke(command.bench, ["launch", "--json", "--seconds", "0.01"])
    assert end.exit_code == 0, end.output
    result = json.loads(end.stdout)
    assert {row["launcher"]: row["seconds"] for row in result["rows"]} == seconds
    # one more than what counts: the first start of each finds nothing in memory
    assert min(started.count(side) for side in seconds) >= 4
    assert result["best_torchrun"] == "torchrun --master-port"
    assert result["own_cost_over_torchrun"]["value"] == pytest.approx(0.1)
    assert result["over_torchrun"]["value"] == pytest.approx(0.7)


def job_of(**changes):
    """A job of two ranks that trained well, but for what is changed on rank 1."""
    good = {"seconds": 0.001, "loss_before": 1.4, "loss": 0.2, "weights": 3.5, "torch": "2.13.0"}
    return lambda side, ranks, steps: [good, {**good, **(changes if side == "allstep" else {})}]


def trained(monkeypatch, job):
    monkeypatch.setattr(trainers, "job", job)
    return CliRunner().invoke(command.bench, ["trainer", "--ranks", "2", "--seconds", "0.01", "--blocks", "1", "--json"])


def test_a_job_counts_with_its_slowest_rank(monkeypatch):
    end = trained(monkeypatch, job_of(seconds=0.002))
    assert end.exit_code == 0, end.output
    (row,) = json.loads(end.stdout)["rows"]
    assert row["steps_per_second"]["allstep"] == pytest.approx(500)
    assert row["over_bare"]["value"] == pytest.approx(0.5)


def test_weights_that_differ_between_ranks_fail_the_command(monkeypatch):
    end = trained(monkeypatch, job_of(weights=3.6))
    assert end.exit_code == 1
    assert "Trainer on 2 ranks: the weights under allstep differ between ranks" in end.stderr


def test_a_trainer_that_learns_nothing_fails_the_command(monkeypatch):
    good = job_of()(None, 2, 20)
    end = trained(monkeypatch, lambda side, ranks, steps: [{**one, "loss": 1.3} for one in good] if side == "allstep" else good)
    assert end.exit_code == 1
    assert "under allstep the loss went from 1.4000 to 1.3000 only; it does not learn" in end.stderr
    assert "the loss on all samples is 1.3000 under allstep and 0.2000 under" in end.stderr


def test_without_matplotlib_one_line_says_how_to_get_the_picture(monkeypatch, tmp_path):
    monkeypatch.setattr(picture, "is_available", lambda: False)
    monkeypatch.setattr(trainers, "job", job_of())
    arguments = ["trainer", "--ranks", "2", "--seconds", "0.01", "--blocks", "1", "--output", str(tmp_path / "o")]
    end = CliRunner().invoke(command.bench, arguments)
    assert end.exit_code == 0, end.output
    assert picture.HOW_TO_GET in end.stderr
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["trainer.json", "trainer.md"]
    assert "| ranks | allstep steps/s |" in end.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("allreduce", "--sizes", "4X"), "'4X' is no size: expected one such as 4096, 64K or 25M"),
        (("allreduce", "--ranks", "1"), "'1' is no number of ranks from 2 to 32."),
        (("allreduce", "--dtypes", "float31"), "'float31' is no dtype; there are float32, bfloat16"),
        (("ddp", "--models", "mlp,gpt"), "'mlp' is no model; there are mlp32, mlp128, small, gpt, resnet, encoder."),
        (("ddp", "--optimizers", "adam"), "'adam' is no optimizer; there are sgd, adamw."),
        (("ddp", "--accumulation", "0"), "'0' is not a whole number from 1 on."),
        (("trainer", "--ranks", "0"), "'0' is no number of ranks"),
        (("launch", "--seconds", "0"), "0.0 is not in the range x>0"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_can(arguments, said):
    assert said in " ".join(refused(*arguments).replace("\n", " ").split())


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("64K", 1 << 16), ("25M", 25 << 20), ("1g", 1 << 30), ("4KiB", 4096)]
)
def test_sizes_can_be_written_short(text, nbytes):
    assert command._bytes(text) == nbytes


def test_the_command_loads_neither_torch_nor_matplotlib():
    code = "import sys, allstep.cli.bench.command; assert not {'torch', 'numpy', 'matplotlib'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_models_of_the_command_are_those_of_the_ranks():
    from allstep.cli.bench.programs.models import MODELS

    assert list(MODELS) == list(command.MODELS)
    assert set(command.QUICK_MODELS) <= MODELS.keys()


def _path():
    """Where this package is found, and what a test put into its working folder."""
    return os.pathsep.join([".", *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])])
