"""SIGKILL at every action of a save: what the next start finds."""

import json
import subprocess
import sys
from typing import Any

import pytest

DRIVER = """
import json, os, shutil, signal, sys, warnings
import torch
from allstep.checkpoint import store
from allstep.checkpoint.manager import CheckpointManager
from allstep.checkpoint.state import TrainState
from allstep.comm.communicator import SoloCommunicator

# One process for all kills: torch is imported once, and each save runs in a fork of it. One thread, so that a fork has all.
torch.set_num_threads(1)
folder = sys.argv[1]
exchange = store._exchange


class Optimizer:  # torch's own would take a second to import
    def state_dict(self):
        return {"moment": torch.ones(3)}

    def load_state_dict(self, state):
        assert torch.equal(state["moment"], torch.ones(3))


def save(step, value, limit=None, hook=lambda action, path: None):
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, value)
    state = TrainState(model=model, optimizer=Optimizer())
    manager = CheckpointManager(folder, SoloCommunicator(), limit, hook=hook)
    manager.prepare()
    manager.save(state, global_step=step, epoch=1.0, global_batch_size=8)


def save_and_be_killed(scenario, at):
    actions = []

    def hook(action, path):
        if len(actions) == at:
            with open(os.path.join(folder, "..", "killed"), "w") as file:
                file.write(f"{action} {path.name}")
            os.kill(os.getpid(), signal.SIGKILL)
        actions.append(action)

    child = os.fork()
    if child == 0:
        code = 1
        try:
            limit = 1 if scenario == "thinning out" else None
            save(10 if scenario.startswith("replacing") else 20, 2.0, limit, hook)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def look():
    manager = CheckpointManager(folder, SoloCommunicator())
    model = torch.nn.Linear(2, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = manager.newest()
        manager.load(path, TrainState(model=model, optimizer=Optimizer()))
    debris = sorted(name for name in os.listdir(folder) if not name.startswith("checkpoint-"))
    manager.prepare()
    return {
        "newest": path.name,
        "value": model.weight[0, 0].item(),
        "warnings": [str(warning.message) for warning in caught],
        "debris": debris,
        "left": sorted(os.listdir(folder)),
    }


for scenario in sys.argv[2:]:
    store._exchange = (lambda one, other: False) if scenario.endswith("without exchange") else exchange
    for at in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        save(10, 1.0)
        status = save_and_be_killed(scenario, at)
        killed = ""
        if status != 0:
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
            with open(os.path.join(folder, "..", "killed")) as file:
                killed = file.read()
        print(json.dumps({"scenario": scenario, "killed": killed} | look()), flush=True)
        if status == 0:
            break
"""

Found = dict[str, list[dict[str, Any]]]

SCENARIOS = ["new", "replacing", "replacing without exchange", "thinning out"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By scenario, what was found after a kill at each action in turn; last, what a save left that was let through."""
    folder = tmp_path_factory.mktemp("kill") / "run"
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder), *SCENARIOS], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    return {scenario: [entry for entry in entries if entry["scenario"] == scenario] for scenario in SCENARIOS}


def test_a_kill_at_any_action_of_a_save_leaves_the_older_checkpoint_or_the_new_one_whole(found: Found) -> None:
    *killed, finished = found["new"]
    assert [entry["killed"] for entry in killed] == [
        "stage staging-checkpoint-20",
        *(
            f"{action} {name}"
            for name in (
                "model.safetensors",
                "optimizer.pt",
                "trainer_state.json",
                "training_args.json",
                "rng_state.pth",
                "manifest.json",
            )
            for action in ("write", "sync")
        ),
        "sync folder staging-checkpoint-20",
        "rename checkpoint-20",
        "sync folder run",
    ]
    for entry in killed[:-1]:
        assert (entry["newest"], entry["value"]) == ("checkpoint-10", 1.0), entry
        assert entry["left"] == ["checkpoint-10"], entry
    assert [entry["debris"] for entry in killed] == [[], *[["staging-checkpoint-20"]] * (len(killed) - 2), []]
    assert (killed[-1]["newest"], killed[-1]["value"]) == ("checkpoint-20", 2.0), "the rename was done"
    assert (finished["newest"], finished["value"]) == ("checkpoint-20", 2.0)
    assert all(entry["warnings"] == [] for entry in (*killed, finished)), "a kill makes nothing that has to be passed over"


@pytest.mark.parametrize("scenario", ["replacing", "replacing without exchange"])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new_one_whole(scenario: str, found: Found) -> None:
    *killed, finished = found[scenario]
    values = [entry["value"] for entry in killed]
    assert values == sorted(values), "once the new one is in, it stays in"
    assert set(values) == {1.0, 2.0}
    assert all(entry["newest"] == "checkpoint-10" and entry["left"] == ["checkpoint-10"] for entry in killed)
    assert all(entry["warnings"] == [] for entry in killed)
    assert (finished["value"], finished["left"]) == (2.0, ["checkpoint-10"])
    if scenario == "replacing without exchange":
        assert [entry["killed"] for entry in killed if entry["killed"].startswith("rename")] == [
            "rename staging-replaced-checkpoint-10",
            "rename checkpoint-10",
        ]


def test_a_kill_while_old_ones_are_deleted_leaves_the_new_one_whole(found: Found) -> None:
    *killed, finished = found["thinning out"]
    deleting = [entry for entry in killed if "staging-removed" in entry["killed"]]
    assert len(deleting) == 2
    for entry in deleting:
        assert (entry["newest"], entry["value"]) == ("checkpoint-20", 2.0)
        assert entry["warnings"] == []
    assert finished["left"] == ["checkpoint-20"]
