"""`allstep doctor`: what it says of this machine, and what it would say of others."""

import json
import os
import re
from pathlib import Path

import pytest

from allstep.cli.doctor.facts import interfaces, launcher_facts, machine_facts, network_facts, software_facts
from allstep.cli.doctor.problems import MIB, problems_of
from allstep.cli.doctor.report import lines_of
from allstep.cli.doctor.trials import try_backends

TORCH = {"version": "2.13.0", "cuda": None, "device": "cpu", "devices": [], "backends": ["gloo", "shm"], "threads": 2}


@pytest.fixture
def well():
    """Facts about a machine on which all is well: this one, with what may differ here put right."""
    machine = {**machine_facts(), "devices_visible": 0}
    machine["shm"] = {"size": 1024 * MIB, "free": 1024 * MIB, "writable": True}
    machine["limits"] = {name: {"soft": None, "hard": None} for name in machine["limits"]}
    return {
        "software": software_facts(),
        "torch": TORCH,
        "machine": machine,
        "network": {**network_facts(), "interfaces": {"lo": ["127.0.0.1"], "eth0": []}, "hostname_is": ["10.0.0.1"]},
        "launchers": launcher_facts({}),
        "launch": [("ranks", "1", "default")],
        "trials": [{"backend": "gloo", "ok": True, "seconds": 2.0, "error": None, "skipped": None}],
    }


def test_it_says_what_this_machine_has_and_that_both_backends_work(allstep):
    end = allstep("doctor")
    assert end.returncode == 0, end.stdout + end.stderr
    for title in (
        "Software",
        "Machine",
        "Network",
        "Launchers",
        "What `allstep launch SCRIPT` would do",
        "Two ranks over each",
    ):
        assert re.search(rf"^{re.escape(title)}", end.stdout, re.MULTILINE), title
    for said in (r"torch +2\.", r"lo +127\.0\.0\.1", r"gloo +well: joined", r"shm +well: joined", r"nobody launched"):
        assert re.search(said, end.stdout), said
    assert "BROKEN" not in end.stdout


def test_json_has_the_facts_and_the_problems_of_a_shell_in_which_training_would_be_refused(allstep):
    end = allstep("doctor", "--json", "--no-trials", RANK="0", SLURM_JOB_ID="7")
    assert end.returncode == 1, end.stderr
    facts = json.loads(end.stdout)
    assert facts["torch"]["backends"][:2] == ["gloo", "shm"]
    assert facts["launchers"]["variables"].items() >= {"RANK": "0", "SLURM_JOB_ID": "7"}.items()
    assert facts["trials"] == []
    (problem,) = (problem for problem in facts["problems"] if problem["broken"])
    assert problem["what"].startswith("Training would be refused in this shell: The launcher's variables are half set: RANK=0")
    assert problem["remedy"] == "unset RANK"


def test_a_machine_without_problems_has_none(well):
    assert problems_of(well) == []
    assert list(lines_of(well, []))[-1] == "Nothing is wrong."


def changed(facts, path, value):
    """`facts` with another value at `path`."""
    head, _, rest = path.partition(".")
    return {**facts, head: changed(facts[head], rest, value) if rest else value}


FAILED = [{"backend": "shm", "ok": False, "seconds": 3.0, "error": "it did not end within 3 s", "skipped": None}]


@pytest.mark.parametrize(
    ("path", "value", "broken", "what", "remedy"),
    [
        ("software.required", {"torch": None}, True, "torch is not installed", "-m pip install torch"),
        ("torch", {"error": "no libgomp"}, True, "torch cannot be used: no libgomp", "-c 'import torch'"),
        ("machine.devices_visible", 8, True, "Linux shows 8", "nvidia-smi"),
        ("machine.shm", None, False, "/dev/shm is not there", "mount -t tmpfs"),
        ("machine.shm.free", 64 * MIB, False, "/dev/shm has 64 MiB free", "--shm-size=1g"),
        ("machine.limits.nofile", {"soft": 256, "hard": 4096}, False, "256 files open", "ulimit -n 4096"),
        ("network.interfaces", {"eth0": ["10.0.0.1"]}, True, "no loopback interface", "ip link set lo up"),
        ("network.hostname_is", None, False, "stands for no address", "export GLOO_SOCKET_IFNAME=eth0"),
        ("network.localhost", None, False, "localhost stands for no address", "/etc/hosts"),
        ("network.free_port_error", "Port 0 cannot be used", True, "Port 0 cannot be used", "ip_local_port_range"),
        ("launchers", launcher_facts({"WORLD_SIZE": "2"}), True, "half set: WORLD_SIZE=2", "unset WORLD_SIZE"),
        ("launchers", launcher_facts({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}), False, "has 4 tasks", "srun python train.py"),
        ("trials", FAILED, True, "Two ranks over shm failed: it did not end", "-m allstep.comm.selftest shm"),
    ],
)
def test_each_problem_comes_with_a_line_to_type(well, path, value, broken, what, remedy):
    facts = changed(well, path, value)
    (problem,) = problems_of(facts)
    assert (problem.broken, what in problem.what, remedy in problem.remedy) == (broken, True, True)
    text = "\n".join(lines_of(facts, [problem]))
    assert f"{'BROKEN' if broken else 'note'}: {problem.what}\n    {problem.remedy}" in text
    assert ("Nothing is broken." in text) == (not broken)


def test_a_gpu_whose_driver_locks_memory_is_told_the_limit(well):
    facts = changed(changed(well, "machine.devices_visible", 1), "torch.devices", ["H200"])
    facts = changed(facts, "machine.limits.memlock", {"soft": 8 * MIB, "hard": None})
    (problem,) = problems_of(facts)
    assert "ulimit -l unlimited" in problem.remedy


def test_what_is_broken_comes_first(well):
    facts = changed(changed(well, "machine.shm", None), "trials", FAILED)
    assert [problem.broken for problem in problems_of(facts)] == [True, False]


def test_a_trial_that_hangs_is_ended_and_said_to(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (trial,) = try_backends({"backends": ["gloo"], "devices": []}, seconds=0.05)
    assert (trial["ok"], trial["error"]) == (False, "it did not end within 0.05 s")
    assert not [command for command in commands_of_children() if "doctor" in command or "selftest" in command]
    assert os.listdir(tmp_path) == []


def commands_of_children():
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            yield Path(f"/proc/{pid}/cmdline").read_text()


def test_backends_that_need_more_than_there_is_are_not_tried():
    found = try_backends({"backends": ["nccl", "mpi"], "devices": ["H200"]})
    assert [trial["skipped"] for trial in found] == ["two ranks need two devices, and there is 1", "mpi needs its own starter"]


def test_interfaces_have_their_addresses():
    assert "127.0.0.1" in interfaces()["lo"]
