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
