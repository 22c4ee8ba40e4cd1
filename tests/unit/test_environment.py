"""Launcher variables in, `WorkerEnvironment` out: each launcher's words, half-set ones, and contradictions."""

import json
from itertools import combinations

import pytest

from allstep.environment import WorkerEnvironment
from allstep.errors import LaunchVariablesError

WHOLE = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
HALVES = [names for count in range(1, 4) for names in combinations(WHOLE, count) if {"RANK", "WORLD_SIZE"} & {*names}]


def read(**variables):
    return WorkerEnvironment.from_variables(variables)


def test_nothing_set_is_a_world_of_one_that_nobody_launched():
    assert read() == WorkerEnvironment()
    assert not read().is_launched
    assert (read().rank, read().world_size, read().local_rank, read().local_world_size) == (0, 1, 0, 1)


def test_an_address_left_over_in_a_shell_says_nothing():
    assert read(MASTER_ADDR="node1", MASTER_PORT="29500") == WorkerEnvironment()


def test_empty_variables_count_as_not_set():
    assert read(RANK="", WORLD_SIZE="", LOCAL_RANK="", MASTER_ADDR="", MASTER_PORT="") == WorkerEnvironment()


@pytest.mark.parametrize(
    ("launcher", "own"),
    [
        ("allstep", {"ALLSTEP_RUN_ID": "cafe", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
        ("torchrun", {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}),
        (
            "accelerate",
            {
                "ACCELERATE_MIXED_PRECISION": "no",
                "TORCHELASTIC_RUN_ID": "none",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
            },
        ),
        ("variables", {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
    ],
)
def test_each_launcher_is_read_and_named(launcher, own):
    environment = read(**WHOLE, **own)
    assert environment == WorkerEnvironment(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="10.0.0.7",
        master_port=29500,
        launcher=launcher,
    )
    assert environment.is_launched


def test_without_local_numbers_the_job_is_taken_for_one_host():
    environment = read(**WHOLE)
    assert (environment.local_rank, environment.local_world_size) == (3, 4)


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("1", True), ("YES", True), ("false", False), ("", False)])
@pytest.mark.parametrize("launched", [False, True])
def test_accelerates_wish_for_the_cpu_is_heard(value, expected, launched):
    assert read(**(WHOLE if launched else {}), ACCELERATE_USE_CPU=value).use_cpu is expected


@pytest.mark.parametrize("names", HALVES, ids="+".join)
def test_half_set_variables_are_an_error_that_lists_what_is_missing_and_what_is_there(names):
    with pytest.raises(LaunchVariablesError) as caught:
        read(**{name: WHOLE[name] for name in names})
    there, missing = str(caught.value).split(", but ")
    missing = missing.split(" missing.")[0]
    for name in WHOLE:
        assert (name in missing) == (name not in names)
        assert (f"{name}={WHOLE[name]}" in there) == (name in names)
    assert "allstep launch" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_local_rank_alone_is_half_set():
    with pytest.raises(LaunchVariablesError, match=r"LOCAL_RANK=1, but RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are missing"):
        read(LOCAL_RANK="1")


def test_a_launched_world_of_one_needs_no_address():
    environment = read(RANK="0", WORLD_SIZE="1")
    assert (environment.world_size, environment.master_port, environment.launcher) == (1, 0, "variables")
    assert read(WORLD_SIZE="1") == environment


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["two", "1.0", "1e3"])
def test_what_is_no_number_is_named_with_its_value(name, value):
    variables = {**WHOLE, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", name: value}
    with pytest.raises(LaunchVariablesError, match=rf"{name}='{value}' is not a whole number"):
        read(**variables)


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "4"), ("0", "0"), ("7", "2")])
def test_a_rank_outside_its_world_is_an_error_with_both(rank, size):
    with pytest.raises(LaunchVariablesError, match=f"RANK={rank}.*WORLD_SIZE={size}"):
        read(**{**WHOLE, "RANK": rank, "WORLD_SIZE": size})


@pytest.mark.parametrize(("local_rank", "local_size"), [("2", "2"), ("-1", "2"), ("0", "5"), ("0", "0")])
def test_local_numbers_that_contradict_the_world_are_an_error_with_all_three(local_rank, local_size):
    with pytest.raises(LaunchVariablesError) as caught:
        read(**WHOLE, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=local_size)
    for said in (f"LOCAL_RANK={local_rank}", f"LOCAL_WORLD_SIZE={local_size}", "WORLD_SIZE=4"):
        assert said in str(caught.value)


def test_what_a_launcher_sets_is_read_back():
    environment = WorkerEnvironment(
        rank=5, world_size=8, local_rank=1, local_world_size=4, master_addr="::1", master_port=1234, launcher="variables"
    )
    assert WorkerEnvironment.from_variables(environment.variables()) == environment
    assert WorkerEnvironment(**json.loads(environment.to_json())) == environment
