from pathlib import Path

import pytest

from allstep.errors import ArgumentsError
from allstep.launch.spec import LaunchSpec, cores_available, default_num_processes, threads_per_rank, visible_gpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_spec_survives_json():
    spec = LaunchSpec(
        script="train.py", args=("--lr", "1 2"), num_processes=3, log_dir="logs", grace_period=0.5, env=(("A", "1"),)
    )
    assert LaunchSpec.from_json(spec.to_json()) == spec


def test_every_problem_of_a_spec_is_told_at_once():
    with pytest.raises(ArgumentsError) as caught:
        LaunchSpec(
            script="train.py",
            num_processes=0,
            num_cpu_threads_per_process=0,
            main_process_port=70000,
            grace_period=float("nan"),
            num_machines=2,
            machine_rank=2,
            max_restarts=-1,
            monitor_interval=0.0,
        )
    found = ("num_processes=0", "num_cpu_threads_per_process=0", "main_process_port=70000", "grace_period=nan")
    for problem in (*found, "machine_rank=2: expected 0 to 1", "main_process_ip", "max_restarts=-1", "monitor_interval=0.0"):
        assert problem in str(caught.value)
    with pytest.raises(ArgumentsError, match="num_machines=0: expected 1 or more"):
        LaunchSpec(script="train.py", num_machines=0)


def test_the_command_keeps_arguments_apart():
    script = LaunchSpec(script="a b.py", args=("--x", "", "y z"))
    assert script.command("python") == ["python", "-m", "allstep.launch.worker", "a b.py", "--x", "", "y z"]
    module = LaunchSpec(script="pkg.train", module=True)
    assert module.command("python") == ["python", "-m", "allstep.launch.worker", "-m", "pkg.train"]
    program = LaunchSpec(script="sh", args=("-c", "x"), no_python=True)
    assert program.command("python") == ["python", "-m", "allstep.launch.worker", "--no_python", "sh", "-c", "x"]
    with pytest.raises(ArgumentsError, match="module and no_python are both said"):
        LaunchSpec(script="x", module=True, no_python=True)


@pytest.mark.parametrize(
    ("cores", "ranks", "variables", "asked", "expected"),
    [
        (8, 2, {}, None, 4),
        (7, 2, {}, None, 3),
        (2, 4, {}, None, 1),
        (8, 2, {"OMP_NUM_THREADS": "3"}, None, None),
        (8, 2, {"OMP_NUM_THREADS": ""}, None, 4),
        (8, 2, {"OMP_NUM_THREADS": "3"}, 5, 5),
    ],
)
def test_threads_share_the_cores_unless_the_user_chose(cores, ranks, variables, asked, expected):
    assert threads_per_rank(cores, ranks, variables, asked) == expected


def test_there_is_one_rank_per_gpu_and_one_without():
    assert [default_num_processes(gpus) for gpus in (0, 1, 8)] == [1, 1, 8]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/job/step/cpu.max": "400000 100000\n",
            },
            4,
        ),
        ({"proc/self/cgroup": "0::/../../not/here\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (
            {
                "proc/self/cgroup": "5:memory:/\n4:cpu,cpuacct:/docker/abc\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "500000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, 16),
    ],
)
def test_cores_are_cut_by_the_quota_of_the_control_group(tmp_path, files, expected):
    assert cores_available(affinity=16, root=str(write(tmp_path, files))) == expected


def test_cores_of_this_machine_are_at_least_one():
    assert cores_available() >= 1


GPUS = {f"proc/driver/nvidia/gpus/0000:0{i}:00.0/information": "" for i in range(4)}


@pytest.mark.parametrize(
    ("files", "variables", "expected"),
    [
        ({}, {}, 0),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}, 0),
        (GPUS, {}, 4),
        ({"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""}, {}, 2),
        (GPUS, {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (GPUS, {"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        (GPUS, {"CUDA_VISIBLE_DEVICES": "2, 3"}, 2),
        (GPUS, {"CUDA_VISIBLE_DEVICES": "0,7,1"}, 1),
        (GPUS, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-1"}, 2),
    ],
)
def test_gpus_are_those_a_rank_would_see(tmp_path, files, variables, expected):
    assert visible_gpus(variables, root=str(write(tmp_path, files))) == expected
