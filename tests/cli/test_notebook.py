"""Ranks that are started by a call: from what looks like a notebook, where functions cannot be imported."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import allstep
from allstep.errors import ArgumentsError
from allstep.notebook import fork_problem, notebook_launcher

RUN = """
    import json, os, sys
    import torch
    import allstep

    def say(**what):
        with open(f"said-{os.environ.get('RANK', 'none')}", "w") as file:
            json.dump(what, file)
"""
TRAIN = """
    import torch.distributed as dist

    def train(scale, name="train"):
        world = allstep.join()
        total = torch.full((1 << 18,), float(scale * (world.rank + 1)))
        dist.all_reduce(total)
        say(total=total[0].item(), launcher=world.launcher, rank=world.rank, threads=torch.get_num_threads())
"""
FREE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@pytest.fixture
def notebook(tmp_path):
    """Run cells as a notebook does: in a __main__ without a file. Gives the end of the process, and what each rank said."""

    def run(*cells, **variables):
        code = "\n".join(textwrap.dedent(cell) for cell in cells)
        own = {name: value for name, value in os.environ.items() if name not in FREE}
        command = [sys.executable, "-W", "error::DeprecationWarning", "-c", code]
        end = subprocess.run(command, cwd=tmp_path, env={**own, **variables}, capture_output=True, text=True, timeout=120)
        return end, [json.loads(path.read_text()) for path in sorted(tmp_path.glob("said-*"))]

    return run


def test_functions_of_the_notebook_run_on_ranks_that_join(notebook):
    end, said = notebook(RUN, TRAIN, "scale = 2\nallstep.notebook_launcher(lambda: train(scale), num_processes=2)")
    assert end.returncode == 0, end.stderr
    assert [each["total"] for each in said] == [6.0, 6.0]
    assert [each["rank"] for each in said] == [0, 1]
    assert {each["launcher"] for each in said} == {"allstep"}
    assert not torch.distributed.is_initialized()


USED = """
    import allstep.notebook
    allstep.notebook.PROBE_SECONDS = 1.0
    torch.set_num_threads(2)
    torch.ones(1 << 20).mul(2).sum()
"""
"""After this a copy of the process hangs where it computes with two threads."""


@pytest.mark.long
def test_after_threads_were_used_ranks_have_one_or_are_new_processes_where_the_function_can_be_sent(notebook, tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(RUN.replace("said-", "sent-") + TRAIN))
    calls = (
        "allstep.notebook_launcher(train, (1,), 2, use_port='0')\nimport mine\nallstep.notebook_launcher(mine.train, (2,), 2)"
    )
    without = "import sys\nsys.modules['cloudpickle'] = None"
    end, copies = notebook(RUN, TRAIN, USED, without, calls, OMP_NUM_THREADS="2", PYTHONPATH=".")
    assert end.returncode == 0, end.stderr
    assert [(each["total"], each["threads"]) for each in copies] == [(3.0, 1), (3.0, 1)]
    new = [json.loads((tmp_path / f"sent-{rank}").read_text()) for rank in range(2)]
    assert [(each["total"], each["threads"]) for each in new] == [(6.0, 2), (6.0, 2)]
    assert end.stderr.count("one thread each instead of 2, with which it hangs in its first computation") == 1
    assert "train is defined in the notebook, from which a new process cannot import" in end.stderr
    assert "pip install cloudpickle" in end.stderr


@pytest.mark.long
def test_with_cloudpickle_a_function_of_the_notebook_goes_to_new_processes(notebook):
    pytest.importorskip("cloudpickle")
    end, new = notebook(RUN, TRAIN, USED, "allstep.notebook_launcher(train, (1,), 2)", OMP_NUM_THREADS="2")
    assert end.returncode == 0, end.stderr
    assert [(each["total"], each["threads"]) for each in new] == [(3.0, 2), (3.0, 2)]


def test_a_failing_rank_is_named_with_its_traceback_or_its_signal_and_none_is_left(notebook):
    fails = """
        import signal

        def fails(how):
            allstep.join()
            if os.environ["RANK"] == "1" and how == "raise":
                raise ValueError("bad row")
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            torch.distributed.all_reduce(torch.ones(1))

        texts = []
        for how in ("raise", "kill"):
            try:
                allstep.notebook_launcher(fails, (how,), num_processes=2)
            except allstep.errors.RankFailedError as error:
                texts.append(str(error))
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            say(texts=texts, left=file.read())
    """
    end, (said,) = notebook(RUN, "import allstep.errors", fails)
    assert end.returncode == 0, end.stderr
    raised, killed = said["texts"]
    assert raised.startswith("Rank 1 of 2 failed first: ValueError: bad row\n\nTraceback (most recent call last):")
    assert "in fails" in raised
    assert "Rank 1 of 2 was killed by signal 9 (SIGKILL)" in killed
    assert said["left"] == ""


def test_one_rank_is_called_here():
    called = []
    notebook_launcher(lambda *what: called.append((os.getpid(), what)), (1, 2), num_processes=1)
    assert called == [(os.getpid(), (1, 2))]
    assert allstep.notebook_launcher is notebook_launcher


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_processes": 0}, "num_processes=0: expected 1 or more"),
        ({"num_processes": 2, "mixed_precision": "fp8"}, "mixed_precision='fp8'"),
        ({"num_processes": 2, "num_nodes": 2}, "num_nodes=2: expected 1"),
        ({"num_processes": 2, "start_method": "thread"}, "start_method='thread'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, said):
    with pytest.raises(ArgumentsError, match="notebook_launcher cannot start ranks") as caught:
        notebook_launcher(print, **arguments)
    assert said in str(caught.value)


def test_a_rank_cannot_start_ranks(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentsError, match=r"this is rank 1 of 2 already"):
        notebook_launcher(print, num_processes=2)


def test_a_device_that_was_used_before_is_named_with_a_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert fork_problem(1) == "cuda was used in this process before, and devices cannot be used in a copy"
    with pytest.raises(ArgumentsError) as caught:
        notebook_launcher(lambda: None, num_processes=2)
    for said in (
        "cuda was used in this process before",
        "cannot be sent there",
        "pip install cloudpickle",
        "restart the notebook",
    ):
        assert said in str(caught.value)
