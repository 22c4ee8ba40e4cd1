import json
import os
import re
import socket
import subprocess
import sys

import pytest

from allstep.launch.variables import glibc_version, steady_memory

REPORT = """
    import json, os, sys
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
             "ALLSTEP_RUN_ID")
    print(json.dumps([sys.argv, {name: os.environ.get(name) for name in names}]), flush=True)
"""


def reported(end):
    """What the script REPORT said on rank 0: its arguments and its variables."""
    assert end.returncode == 0, end.stderr
    return json.loads(end.stdout)


def kept(temporary):
    """The folders of launches that were not removed."""
    return [folder for folder in temporary.iterdir() if folder.name.startswith("allstep-")]


# What the script is given.


def test_each_rank_finds_who_it_is(allstep, script, tmp_path):
    end = allstep("launch", "--num_processes", "3", "--log_dir", "logs", script(REPORT))
    ranks = [reported(end)[1], *(json.loads((tmp_path / "logs" / f"rank-{i}.log").read_text())[1] for i in (1, 2))]
    for rank, variables in enumerate(ranks):
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "3"
        assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert len({variables["MASTER_PORT"] for variables in ranks}) == 1
    assert len({variables["ALLSTEP_RUN_ID"] for variables in ranks}) == 1


def test_each_launch_has_an_id_of_its_own(allstep, script):
    name = script(REPORT)
    assert reported(allstep("launch", name))[1]["ALLSTEP_RUN_ID"] != reported(allstep("launch", name))[1]["ALLSTEP_RUN_ID"]


def test_all_that_follows_the_script_is_the_scripts(allstep, script):
    arguments = ["--help", "--num_processes", "7", "--", "-m", "", "a b", "--log_dir=x", "--num-processes=3"]
    argv, variables = reported(allstep("launch", "--num_processes", "2", script(REPORT), *arguments))
    assert argv == ["train.py", *arguments]
    assert variables["WORLD_SIZE"] == "2"


@pytest.mark.parametrize(
    "spelling", [["--num_processes", "2"], ["--num-processes", "2"], ["--num_processes=2"], ["--num-processes=2"]]
)
def test_options_have_two_spellings(allstep, script, spelling):
    assert reported(allstep("launch", *spelling, script(REPORT)))[1]["WORLD_SIZE"] == "2"


def test_every_option_has_both_spellings(allstep, script, tmp_path):
    options = ["num_processes", "1"], ["num_cpu_threads_per_process", "1"], ["main_process_port", "0"]
    for name, value in (*options, ["log_dir", "logs"], ["grace_period", "2.5"]):
        for spelled in (name, name.replace("_", "-")):
            assert allstep("launch", f"--{spelled}", value, script(REPORT)).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--standalone", "--nnodes=1", "--nproc-per-node=2"],
        [
            "--nnodes",
            "1",
            "--nproc_per_node",
            "2",
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            "localhost:0",
            "--rdzv_id",
            "x",
        ],
        ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"],
    ],
    ids=["torchrun", "torchrun c10d", "accelerate"],
)
def test_the_words_of_others_start_the_same_ranks(allstep, script, words):
    end = allstep("launch", *words, script(REPORT), "--tee", "3")
    argv, variables = reported(end)
    assert argv == ["train.py", "--tee", "3"]
    assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("2", "2")
    said = "allstep: without effect here: --multi_gpu, --dynamo_backend"
    assert (said in end.stderr) == ("--multi_gpu" in words)


def test_settings_come_from_flags_then_variables_then_a_file(allstep, script, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_processes": 3, "grace_period": 2, "main_process_port": 1, "x": 0}))
    end = allstep(
        "launch", "--config_file", "config.json", "--main_process_port", "0", "--print_config", ALLSTEP_NUM_PROCESSES="2"
    )
    assert end.returncode == 0, end.stderr
    rows = [re.split(r"  +", line, maxsplit=2) for line in end.stdout.splitlines()]
    assert ["num_processes", "2", "ALLSTEP_NUM_PROCESSES"] in rows
    assert ["grace_period", "2.0", "grace_period in config.json"] in rows
    assert ["main_process_port", "0", "--main_process_port"] in rows
    assert ["max_restarts", "0", "default"] in rows
    assert "config.json has keys that mean nothing here: x" in end.stderr
    named = allstep("launch", "--main_process_port", "0", script(REPORT), ALLSTEP_CONFIG_FILE="config.json")
    assert reported(named)[1]["WORLD_SIZE"] == "3"


def test_what_ranks_see_of_devices_and_precision_is_set_for_them(allstep, script):
    name = script("import json, os; print(json.dumps([os.environ.get(name) for name in os.environ['NAMES'].split()]))")
    names = "CUDA_VISIBLE_DEVICES ACCELERATE_USE_CPU ACCELERATE_MIXED_PRECISION"
    end = allstep("launch", "--gpu_ids", "1,0", "--cpu", "--mixed_precision", "bf16", name, NAMES=names)
    assert json.loads(end.stdout) == ["1,0", "true", "bf16"]


def test_a_program_that_is_not_python_is_run_as_it_is(allstep, tmp_path):
    os.mkfifo(tmp_path / "said")  # rank 1 fails when rank 0 has spoken
    code = 'if [ $RANK = 0 ]; then echo "0 of $WORLD_SIZE: $1"; echo > said; else read x < said; exit 1; fi'
    end = allstep("launch", "--num_processes", "2", "--no_python", "sh", "-c", code, "sh", "--x")
    assert end.stdout == "0 of 2: --x\n"
    assert "rank 1 of 2 failed first" in end.stderr
    assert end.returncode == 1


def test_machines_that_come_and_go_are_handed_to_torchs_agent_with_the_failure_of_a_rank(allstep, script, tmp_path):
    os.mkfifo(tmp_path / "said")  # rank 1 fails when rank 0 has spoken
    code = """
        import os
        print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
        with open("said", "r" if os.environ["RANK"] == "1" else "w") as said:
            if said.readable():
                said.read()
                raise ValueError("bad row")
    """
    rendezvous = ["--rdzv_endpoint", "localhost:0", "--rdzv_id", "x", "--rdzv_conf", "last_call_timeout=1"]
    end = allstep("launch", "--nnodes", "1:2", "--nproc_per_node", "2", *rendezvous, script(code))
    assert "allstep: 1:2 machines that find one another: handed to torch's elastic agent" in end.stderr
    assert sorted(end.stdout.split("\n")) == ["", "rank 0 of 2", "rank 1 of 2"]
    root_cause = end.stderr[end.stderr.index("Root Cause") :]
    assert "rank      : 1" in root_cause
    assert "ValueError: bad row" in root_cause
    assert end.returncode == 1


@pytest.mark.parametrize("option", ["-m", "--module"])
def test_a_module_is_run_by_its_name(allstep, script, option, tmp_path):
    script(REPORT, "pkg/train.py")
    argv, _ = reported(allstep("launch", option, "pkg.train", "-m", "--x"))
    assert argv == [str(tmp_path / "pkg" / "train.py"), "-m", "--x"]


def test_rank_0_has_the_standard_input_and_the_others_have_none(allstep, script, tmp_path):
    name = script("import sys; print(repr(sys.stdin.read()))")
    end = allstep("launch", "--num_processes", "2", "--log_dir", "logs", name, typed="hello")
    assert end.stdout == "'hello'\n"
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "''\n"


# Numbers that are chosen where the user chose none.


def test_without_a_gpu_there_is_one_rank_and_a_line_that_tells_how_to_ask_for_more(allstep, script):
    end = allstep("launch", script(REPORT))
    assert reported(end)[1]["WORLD_SIZE"] == "1"
    assert "--num_processes" in end.stderr
    assert "--num_processes" not in allstep("launch", "--num_processes", "1", script(REPORT)).stderr


def test_threads_share_the_cores_of_the_job(allstep, script):
    cores = len(os.sched_getaffinity(0))
    threads = int(reported(allstep("launch", "--num_processes", "2", script(REPORT)))[1]["OMP_NUM_THREADS"])
    assert 1 <= threads <= max(1, cores // 2)


def test_threads_that_the_user_set_stay(allstep, script):
    name = script(REPORT)
    assert reported(allstep("launch", name, OMP_NUM_THREADS="3"))[1]["OMP_NUM_THREADS"] == "3"
    asked = allstep("launch", "--num_cpu_threads_per_process", "5", name, OMP_NUM_THREADS="3")
    assert reported(asked)[1]["OMP_NUM_THREADS"] == "5"


def test_ranks_on_the_cpu_keep_freed_memory_unless_the_user_chose(allstep, script):
    name = script("import json, os; print(json.dumps([{k: v for k, v in os.environ.items() if k.startswith('MALLOC_')}]))")
    (own,) = json.loads(allstep("launch", name).stdout)
    assert own == steady_memory({}, glibc_version())
    (chosen,) = json.loads(allstep("launch", name, MALLOC_ARENA_MAX="1").stdout)
    assert chosen == {"MALLOC_ARENA_MAX": "1"}


def test_a_port_of_the_users_choice_is_used(allstep, script):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    assert reported(allstep("launch", "--main_process_port", port, script(REPORT)))[1]["MASTER_PORT"] == port


def test_twenty_launches_at_once_have_twenty_ports_on_which_rank_0_can_listen(script, tmp_path, clean):
    code = """
        import os, socket, sys
        port = int(os.environ["MASTER_PORT"])
        with socket.create_server(("", port)):
            print(port, flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-m", "allstep", "launch", "--num_processes", "1", script(code)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    launches = [subprocess.Popen(command, cwd=tmp_path, env=clean, text=True, **pipes) for _ in range(20)]
    ports = [launch.stdout.readline() for launch in launches]  # all are listening now
    for launch in launches:
        launch.communicate("", timeout=60)
    assert [launch.returncode for launch in launches] == [0] * 20
    assert len(set(ports)) == 20


# What is refused, before anything starts.

STARTED = "import pathlib; pathlib.Path('started').touch()"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num_processes", "0", "train.py"], "num_processes=0: expected 1 or more"),
        (["--num_processes", "-2", "train.py"], "num_processes=-2: expected 1 or more"),
        (["--num_processes", "two", "train.py"], "'two' is not a valid integer"),
        (["--num_cpu_threads_per_process", "0", "train.py"], "num_cpu_threads_per_process=0: expected 1 or more"),
        (["--main_process_port", "99999", "train.py"], "main_process_port=99999: expected 1 to 65535"),
        (["--grace_period", "-1", "train.py"], "grace_period=-1.0: expected a number of seconds, 0 or more"),
        (["--num_processes", "4", "--nproc_per_node", "2", "train.py"], "--num_processes 4 counts the ranks of all machines"),
        (["--use_deepspeed", "train.py"], "--use_deepspeed cannot be done here: allstep keeps a whole model on each rank"),
        (["--fsdp-version=2", "train.py"], "--fsdp_version cannot be done here"),
        (["--dynamo_backend", "inductor", "train.py"], "call torch.compile(model) in the script"),
        (["--mixed_precision", "fp8", "train.py"], "'fp8': expected no, fp16, bf16"),
        (["--nnodes", "1:2", "--nproc_per_node", "1", "train.py"], "needs --run_id NAME"),
        (["--config_file", "nothing.yaml", "train.py"], "The configuration file nothing.yaml cannot be read"),
        (["--no_python", "no-such-program"], "is no program that can be run"),
        (["--no_python", "-m", "train"], "module and no_python are both said"),
        (["--num_proceses", "2", "train.py"], "No such option"),
        (["--log_dir", "train.py/logs", "train.py"], "--log_dir train.py/logs cannot be made: Not a directory"),
        (["nothing.py"], "looked for {folder}/nothing.py"),
        (["nothing.here"], "Did you mean `-m nothing.here`?"),
        (["."], "'.' is a folder"),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_what_cannot_be_launched_is_refused_with_a_reason(allstep, script, tmp_path, temporary, arguments, said):
    script(STARTED)
    end = allstep("launch", *arguments)
    assert end.returncode == 2
    assert said.format(folder=tmp_path) in " ".join(end.stderr.split())
    assert not (tmp_path / "started").exists()
    assert kept(temporary) == []


def test_a_port_that_is_taken_is_refused(allstep, script, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        end = allstep("launch", "--main_process_port", str(port), script(STARTED))
    assert end.returncode == 2
    assert f"Port {port}" in end.stderr
    assert "is taken" in end.stderr
    assert not (tmp_path / "started").exists()


def test_a_launch_inside_a_launch_is_refused(allstep, script, tmp_path):
    code = """
        import subprocess, sys
        sys.exit(subprocess.run([sys.executable, "-m", "allstep", "launch", "inner.py"]).returncode)
    """
    script(STARTED, "inner.py")
    end = allstep("launch", script(code))
    assert "This is rank 0 of another `allstep launch` already" in end.stderr
    assert end.returncode == 2
    assert not (tmp_path / "started").exists()


def test_a_launch_in_each_of_several_tasks_is_refused_unless_each_is_a_machine(allstep, script):
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n1"}
    end = allstep("launch", script(REPORT), **step)
    assert end.returncode == 2
    assert "slurm started 2 processes (SLURM_PROCID=1, SLURM_NTASKS=2), and each would launch a job of its own" in end.stderr
    assert "srun python train.py" in end.stderr
    shown = allstep("launch", "--nnodes", "2", "--print_config", **step)
    assert shown.returncode == 0, shown.stderr
    assert reported(allstep("launch", script(REPORT), **{**step, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}))


# What is shown and what is kept.


def test_only_rank_0_is_heard_and_nothing_is_left_after_success(allstep, script, temporary):
    code = "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"
    end = allstep("launch", "--num_processes", "3", script(code))
    assert end.returncode == 0
    assert end.stdout == "out 0\n"
    first, second = end.stderr.splitlines()
    assert re.fullmatch(r"allstep: 3 ranks on 127\.0\.0\.1:\d+, \d+ threads? each; output of ranks 1-2: \S+", first)
    assert second == "err 0"
    assert kept(temporary) == []


def test_a_log_dir_keeps_the_output_after_success(allstep, script, tmp_path, temporary):
    code = "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"
    assert allstep("launch", "--num_processes", "2", "--log_dir", "new/logs", script(code)).returncode == 0
    assert os.listdir(tmp_path / "new" / "logs") == ["rank-1.log"]
    assert (tmp_path / "new" / "logs" / "rank-1.log").read_text() == "out 1\nerr 1\n"
    assert kept(temporary) == []


def test_after_a_failure_the_output_is_shown_and_kept(allstep, script, temporary):
    code = """
        import os, sys
        print("step 1 on rank", os.environ["RANK"])
        if os.environ["RANK"] == "1":
            raise ValueError("bad")
        sys.stdin.read()
    """
    end = allstep("launch", "--num_processes", "2", script(code))
    assert end.returncode == 1
    assert "  | step 1 on rank 1" in end.stderr
    (folder,) = kept(temporary)
    assert f"output kept: {folder}/rank-1.log" in end.stderr
    assert (folder / "rank-1.log").read_text().startswith("step 1 on rank 1\nTraceback")


def test_a_rank_may_finish_long_before_the_others(allstep, script, tmp_path):
    code = """
        import os, time
        if os.environ["RANK"] == "1":
            open("done", "w").close()
            raise SystemExit
        deadline = time.monotonic() + 60
        while not os.path.exists("done") and time.monotonic() < deadline:
            time.sleep(0.01)
        print("rank 0 went on")
    """
    end = allstep("launch", "--num_processes", "2", script(code))
    assert (end.returncode, end.stdout) == (0, "rank 0 went on\n")


def test_any_torch_program_runs(allstep, script, tmp_path):
    code = """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        print(dist.get_world_size(), total.item(), torch.get_num_threads())
        dist.destroy_process_group()
    """
    end = allstep("launch", "--num_processes", "2", "--num_cpu_threads_per_process", "1", "--log_dir", "logs", script(code))
    assert end.returncode == 0, end.stderr
    assert end.stdout == (tmp_path / "logs" / "rank-1.log").read_text() == "2 3.0 1\n"


def test_accelerate_is_told_to_keep_to_the_cpu_where_there_is_no_gpu(allstep, script):
    name = script("import os; print(os.environ['ACCELERATE_USE_CPU'])")
    assert allstep("launch", name).stdout == "true\n"
    assert allstep("launch", name, ACCELERATE_USE_CPU="no").stdout == "no\n"
