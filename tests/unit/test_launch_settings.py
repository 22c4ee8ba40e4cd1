"""Which of several values of a setting counts, and what the words of torchrun and accelerate come to."""

import json
import subprocess
import sys

import pytest

from allstep.cli.launch.command import launch
from allstep.devices import KINDS
from allstep.errors import ArgumentsError
from allstep.launch.config_file import check_keys, read_config_file
from allstep.launch.foreign import refusal
from allstep.launch.plan import (
    Machine,
    Program,
    elastic_command,
    elastic_variables,
    is_elastic,
    machines_of,
    ranks_here,
    spec_of,
    variables_of,
)
from allstep.launch.settings import SETTINGS, resolve

CUDA, CPU = KINDS[0], KINDS[-1]
PROGRAM = Program(script="train.py", args=("--lr", "1"))
BARE = Machine(gpus=0, cores=6)
EIGHT = Machine(gpus=8, cores=64)


def settled(flags=None, variables=None, file=None):
    return resolve(flags or {}, variables or {}, file or {}, "my.yaml")


def spec(machine=BARE, kind=CPU, **flags):
    return spec_of(settled(flags), PROGRAM, machine, kind)


def refused(function, *arguments, **keywords):
    with pytest.raises(ArgumentsError) as caught:
        function(*arguments, **keywords)
    return str(caught.value)


# Which value counts.


def test_a_flag_wins_over_a_variable_over_a_file_over_the_default():
    levels = [({"num_processes": 1}, "--num_processes"), ({}, "ALLSTEP_NUM_PROCESSES"), ({}, "num_processes in my.yaml")]
    variables, file = {"ALLSTEP_NUM_PROCESSES": "2"}, {"num_processes": 3}
    for index, (flags, origin) in enumerate(levels):
        if index == 2:
            variables = {}
        found = settled(flags, variables, file)["num_processes"]
        assert (found.value, found.origin) == (index + 1, origin)
    assert (settled()["num_processes"].value, settled()["num_processes"].origin) == (None, "default")


def test_a_flag_for_one_setting_drops_nothing_of_the_file():
    found = settled({"main_process_port": 1234}, {}, {"num_processes": 1, "main_process_port": 5})
    assert (found["num_processes"].value, found["main_process_port"].value) == (1, 1234)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_has_a_flag_a_variable_and_a_key(setting):
    raw = {int: "3", float: "2.5", bool: "yes", str: setting.choices[0] if setting.choices else "1"}[setting.kind]
    expected = {int: 3, float: 2.5, bool: True, str: raw}[setting.kind]
    for word in setting.words:
        assert settled({word: expected})[setting.name].value == expected
        assert settled(file={word: raw})[setting.name].value == expected
    for name in setting.all_variables:
        assert settled(variables={name: raw})[setting.name].value == expected
        assert settled(variables={name: ""})[setting.name].origin == "default"


def test_our_variable_wins_over_those_of_others():
    assert settled(variables={"ALLSTEP_NUM_MACHINES": "2", "PET_NNODES": "3"})["num_machines"].value == "2"


def test_two_words_for_one_thing_must_agree():
    assert settled({"num_machines": "2", "nnodes": "2"})["num_machines"].value == "2"
    text = refused(settled, {"num_machines": "2", "nnodes": "3", "master_port": 1, "main_process_port": 2})
    assert "--num_machines 2 and --nnodes 3 are two words for one thing" in text
    assert "--main_process_port 2 and --master_port 1" in text


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ALLSTEP_NUM_PROCESSES": "two"}, "ALLSTEP_NUM_PROCESSES is 'two': expected a whole number"),
        ({"ALLSTEP_GRACE_PERIOD": "long"}, "ALLSTEP_GRACE_PERIOD is 'long': expected a number"),
        ({"ALLSTEP_TEE": "perhaps"}, "ALLSTEP_TEE is 'perhaps': expected true or false"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "'fp8': expected no, fp16, bf16. fp8 is not there yet"),
    ],
)
def test_a_text_that_cannot_be_meant_is_named_with_its_origin(variables, said):
    assert said in refused(settled, {}, variables)


def test_yaml_reads_a_bare_no_as_false():
    assert settled(file={"mixed_precision": False})["mixed_precision"].value == "no"


# How many ranks.


@pytest.mark.parametrize(
    ("flags", "machine", "expected"),
    [
        ({}, BARE, 1),
        ({}, EIGHT, 8),
        ({"cpu": True}, EIGHT, 1),
        ({"num_processes": 4}, BARE, 4),
        ({"num_processes": 4, "num_machines": "2"}, BARE, 2),
        ({"nproc_per_node": "4", "num_machines": "2"}, BARE, 4),
        ({"nproc_per_node": "2", "num_processes": 4, "num_machines": "2"}, BARE, 2),
        ({"nproc_per_node": "auto"}, BARE, 6),
        ({"nproc_per_node": "auto"}, EIGHT, 8),
        ({"nproc_per_node": "cpu"}, EIGHT, 64),
        ({"nproc_per_node": "gpu"}, EIGHT, 8),
    ],
)
def test_ranks_of_this_machine_follow_from_either_word(flags, machine, expected):
    assert ranks_here(settled(flags), machine) == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"num_processes": 4, "nproc_per_node": "2"},
            "--num_processes 4 counts the ranks of all machines and --nproc_per_node 2",
        ),
        ({"num_processes": 5, "nnodes": "2"}, "--num_processes 5 ranks do not divide over 2 machines (--nnodes 2)"),
        ({"num_processes": 4, "nnodes": "1:2"}, "their number may change: --nnodes 1:2. Write --nproc_per_node"),
        ({"nproc_per_node": "gpu"}, "--nproc_per_node gpu, but this machine shows no GPU"),
        ({"nproc_per_node": "many"}, "--nproc_per_node many: expected a number, auto, cpu or gpu"),
    ],
)
def test_counts_that_do_not_fit_are_refused_by_both_words(flags, said):
    assert said in refused(ranks_here, settled(flags), BARE)


def test_the_word_said_closer_to_the_user_wins():
    assert ranks_here(settled({"nproc_per_node": "2"}, {}, {"num_processes": 8}), BARE) == 2
    assert ranks_here(settled({"num_processes": 8}, {"PET_NPROC_PER_NODE": "2"}), BARE) == 8


@pytest.mark.parametrize("said", ["0", "3:2", "two", "1:x", "-1"])
def test_machines_are_a_number_or_a_range(said):
    assert f"--num_machines {said}" in refused(machines_of, settled({"num_machines": said}))


def test_standalone_is_one_machine():
    assert machines_of(settled({"standalone": True})) == (1, 1)
    assert "--standalone means one machine, but --nnodes 2" in refused(
        machines_of, settled({"standalone": True, "nnodes": "2"})
    )


# What is started.


def test_torchruns_words_for_two_machines():
    found = spec(nnodes="2", nproc_per_node="3", node_rank=1, master_addr="node0", master_port=1234, rdzv_id="job")
    assert (found.num_machines, found.machine_rank, found.num_processes) == (2, 1, 3)
    assert (found.main_process_ip, found.main_process_port, found.run_id) == ("node0", 1234, "job")
    assert (found.script, found.args) == ("train.py", ("--lr", "1"))


def test_accelerates_words_for_two_machines():
    found = spec(num_processes=4, num_machines="2", machine_rank=0, main_process_ip="node0", main_process_port=0)
    assert (found.num_machines, found.machine_rank, found.num_processes) == (2, 0, 2)


def test_a_static_endpoint_is_address_and_port():
    found = spec(nnodes="2", node_rank=1, rdzv_backend="static", rdzv_endpoint="[fd00::2]:29400")
    assert (found.main_process_ip, found.main_process_port) == ("fd00::2", 29400)


def test_one_machine_needs_no_rendezvous():
    found = spec(nnodes="1", rdzv_backend="c10d", rdzv_endpoint="localhost:0", nproc_per_node="2")
    assert (found.num_machines, found.num_processes, found.main_process_port) == (1, 2, 0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"nnodes": "2", "master_addr": "a"}, "--nnodes 2, but which of them this is was not said: write --machine_rank I"),
        ({"nnodes": "2", "node_rank": 0}, "main_process_ip is missing"),
        ({"nnodes": "2", "node_rank": 0, "rdzv_endpoint": "a:b"}, "--rdzv_endpoint a:b: expected HOST:PORT"),
        ({"nnodes": "2", "node_rank": 0, "rdzv_endpoint": "a:1", "master_addr": "b"}, "name two hosts"),
        ({"nnodes": "2", "node_rank": 0, "rdzv_endpoint": "a:1", "master_port": 2}, "name two ports"),
    ],
)
def test_machines_that_could_not_meet_are_refused(flags, said):
    assert said in refused(spec, **flags)


def test_devices_precision_and_cpu_go_to_the_ranks_as_variables():
    found = settled({"gpu_ids": "2,3", "mixed_precision": "bf16", "cpu": True})
    assert variables_of(found, CUDA) == {
        "CUDA_VISIBLE_DEVICES": "2,3",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }
    assert variables_of(settled({"gpu_ids": "1"}), KINDS[2]) == {"ASCEND_RT_VISIBLE_DEVICES": "1"}
    assert variables_of(settled({"gpu_ids": "all"}), CUDA) == {}
    assert spec(gpu_ids="0", kind=CPU).env == (("CUDA_VISIBLE_DEVICES", "0"),)


# torch's elastic agent.


def test_machines_that_come_and_go_are_for_torchs_agent():
    assert is_elastic(settled({"nnodes": "1:2"}))
    assert is_elastic(settled({"nnodes": "2", "rdzv_backend": "c10d"}))
    for flags in ({}, {"nnodes": "2"}, {"nnodes": "2", "rdzv_backend": "static"}, {"nnodes": "1", "rdzv_backend": "c10d"}):
        assert not is_elastic(settled(flags))


def test_torchs_agent_is_told_the_same():
    flags = {"nnodes": "1:4", "nproc_per_node": "2", "rdzv_endpoint": "node0:29400", "rdzv_id": "job", "tee": True}
    command = elastic_command(settled({**flags, "max_restarts": 3}), Program(script="pkg.train", module=True), BARE, "python")
    assert command == [
        *("python", "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc_per_node=2", "--rdzv_backend=c10d"),
        *("--rdzv_endpoint=node0:29400", "--rdzv_id=job", "--max_restarts=3", "--monitor_interval=1.0", "--tee=3"),
        *("-m", "allstep.launch.worker", "-m", "pkg.train"),
    ]


def test_torchs_agent_needs_a_name_and_a_place():
    text = refused(elastic_command, settled({"nnodes": "1:2"}), PROGRAM, BARE, "python")
    assert "--run_id NAME, the same on all machines" in text
    assert "--rdzv_endpoint HOST:PORT" in text


def test_ranks_below_torchs_agent_have_threads_and_memory_as_below_ours():
    found = elastic_variables(settled({"nnodes": "1:2", "nproc_per_node": "2"}), BARE, {}, pid=7, glibc=(2, 36))
    assert (found["ALLSTEP_LAUNCHER_PID"], found["OMP_NUM_THREADS"], found["ACCELERATE_USE_CPU"]) == ("7", "3", "true")
    assert "MALLOC_TRIM_THRESHOLD_" in found
    assert elastic_variables(settled(), EIGHT, {"OMP_NUM_THREADS": "2"}, pid=7, glibc=(2, 36)) == {"ALLSTEP_LAUNCHER_PID": "7"}


# Files.

WRITTEN_BY_ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
dynamo_config: {}
enable_cpu_affinity: false
fsdp_config: {}
gpu_ids: 0,1
machine_rank: 0
main_process_ip: null
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
use_cpu: true
my_own: 3
"""


def test_a_file_of_accelerate_is_read(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "default_config.yaml"
    path.write_text(WRITTEN_BY_ACCELERATE)
    settings, unknown = read_config_file(str(path))
    assert unknown == ["my_own"]
    found = settled(file=settings)
    assert (found["num_processes"].value, found["cpu"].value, found["gpu_ids"].value) == (4, True, "0,1")
    assert (found["main_process_ip"].origin, found["mixed_precision"].value) == ("default", "bf16")


def test_the_same_in_json_needs_no_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_processes": 2, "tee": True}))
    assert read_config_file(str(path)) == ({"num_processes": 2, "tee": True}, [])
    (tmp_path / "config.yaml").write_text("num_processes: 2")
    assert "pip install pyyaml" in refused(read_config_file, str(tmp_path / "config.yaml"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.json", "{", "is no JSON"),
        ("c.json", "[1]", "holds list, expected keys with values"),
        ("c.yaml", "a: [", "is no YAML"),
        ("c.yaml", "!!python/object/apply:os.system ['touch hacked']", "is no YAML"),
        ("c.json", '{"num_processes": [1]}', "num_processes is [1], expected one value"),
        ("c.json", '{"distributed_type": "FSDP"}', "distributed_type: FSDP cannot be done here"),
        ("c.json", '{"deepspeed_config": {"zero_stage": 2}}', "deepspeed_config cannot be done here: allstep keeps a whole"),
        ("c.json", '{"fsdp_config": {"fsdp_version": 2}}', "fsdp_config cannot be done here"),
        ("c.json", '{"tpu_use_cluster": true}', "tpu_use_cluster cannot be done here"),
        ("c.json", '{"dynamo_config": {"dynamo_backend": "INDUCTOR"}}', "call torch.compile(model) in the script"),
        ("c.json", '{"compute_environment": "AMAZON_SAGEMAKER"}', "run `allstep launch` on each machine"),
    ],
)
def test_a_file_that_asks_for_what_is_not_there_is_refused_by_key(tmp_path, name, text, said):
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    assert said in refused(read_config_file, str(tmp_path / name))
    assert "cannot be read: No such file" in refused(read_config_file, str(tmp_path / "nothing.yaml"))


def test_sections_that_say_nothing_are_no_reason_to_refuse():
    nothing = {"deepspeed_config": {}, "dynamo_config": {"dynamo_backend": "NO"}, "tpu_env": [], "distributed_type": "NO"}
    assert check_keys(nothing, "f") == ({}, [])


# Flags of others.


def parser_of(module, function):
    """The options of another launcher: each flag, and whether it takes a value."""
    code = (
        f"import json; from {module} import {function} as parser\n"
        "print(json.dumps([[flag, action.nargs != 0] for action in parser()._actions for flag in action.option_strings]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


@pytest.mark.parametrize(
    ("module", "function"),
    [("accelerate.commands.launch", "launch_command_parser"), ("torch.distributed.run", "get_args_parser")],
)
def test_every_flag_of_others_is_taken_or_refused_with_what_to_write(module, function):
    flags = parser_of(module, function)
    if flags is None:
        pytest.skip(f"{module} is not installed")
    assert len(flags) > 30
    own = {name: not option.is_flag for option in launch.params for name in option.opts if name.startswith("-")}
    for flag, takes_value in flags:
        word = flag.replace("-", "_").lstrip("_")
        if flag in ("-h", "--help", "--tee", "-t"):
            continue
        known = own.get(flag if not flag.startswith("--") else f"--{word}")
        assert known == takes_value if known is not None else refusal(word), flag
