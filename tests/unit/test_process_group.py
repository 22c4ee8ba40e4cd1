"""Which device and which backend a rank takes, and what it says where it cannot; and joining a world of one."""

import json
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from allstep.comm import process_group
from allstep.comm.communicator import SoloCommunicator, communicator_for
from allstep.comm.process_group import World, available_backends, choose_backend, choose_device, join, leave
from allstep.environment import WorkerEnvironment
from allstep.errors import BackendError, CollectiveError, LaunchVariablesError


@pytest.fixture
def accelerator(monkeypatch):
    """Pretends that this machine has `count` devices of a type; with None, no accelerator at all."""

    def pretend(device_type, count=1):
        found = None if device_type is None else torch.device(device_type)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return pretend


@pytest.fixture
def backends(monkeypatch):
    """Pretends that this torch was built with these backends."""

    def pretend(*names):
        monkeypatch.setattr(dist, "is_backend_available", lambda name: name in names)

    return pretend


def rank(number, size=4):
    return WorkerEnvironment(rank=number, world_size=size, local_rank=number, local_world_size=size, launcher="torchrun")


# Which device.


def test_without_an_accelerator_ranks_are_on_the_cpu(accelerator):
    accelerator(None)
    assert choose_device(rank(3), use_cpu=False) == torch.device("cpu")


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
def test_each_rank_has_the_device_of_its_local_number(accelerator, device_type):
    accelerator(device_type, 4)
    devices = [choose_device(rank(number), use_cpu=False) for number in range(4)]
    assert devices == [torch.device(device_type, number) for number in range(4)]


def test_a_wish_for_the_cpu_wins_over_devices(accelerator):
    accelerator("cuda", 4)
    assert choose_device(rank(1), use_cpu=True) == torch.device("cpu")


def test_an_accelerator_that_no_backend_serves_is_left_alone(accelerator):
    accelerator("mps", 1)
    assert choose_device(rank(0, 1), use_cpu=False) == torch.device("cpu")


def test_more_ranks_than_devices_is_an_error_with_both_numbers_and_a_way_out(accelerator):
    accelerator("cuda", 2)
    with pytest.raises(LaunchVariablesError) as caught:
        choose_device(rank(3), use_cpu=False)
    for said in ("Rank 3", "LOCAL_RANK=3", "2 cuda device(s)", "at most 2 ranks", "use_cpu=True"):
        assert said in str(caught.value)


# Which backend.


def test_the_backend_made_for_the_device_is_taken_where_none_is_asked_for(accelerator, backends):
    accelerator("cuda", 1)
    backends("gloo", "nccl")
    assert choose_backend(None, "cuda") == "nccl"
    assert choose_backend(None, "cpu") == "gloo"


def test_cpu_ranks_of_one_host_share_memory(accelerator, backends):
    accelerator("cuda", 1)
    backends("gloo", "shm", "nccl")
    assert choose_backend(None, "cpu", one_host=True) == "shm"
    assert choose_backend(None, "cpu", one_host=False) == "gloo"
    assert choose_backend("gloo", "cpu", one_host=True) == "gloo"
    assert choose_backend(None, "cuda", one_host=True) == "nccl"


@pytest.mark.parametrize(
    ("asked", "device_type"), [("gloo", "cpu"), ("GLOO", "cpu"), ("gloo", "cuda"), ("NCCL", "cuda"), ("shm", "cpu")]
)
def test_what_is_asked_for_and_is_there_is_taken(accelerator, backends, asked, device_type):
    accelerator("cuda", 1)
    backends("gloo", "nccl", "shm")
    assert choose_backend(asked, device_type) == asked.lower()


def test_nccl_without_an_nvidia_device_is_an_error_that_lists_what_is_there(accelerator, backends):
    accelerator(None)
    backends("gloo", "nccl")
    with pytest.raises(BackendError) as caught:
        choose_backend("nccl", "cpu")
    assert "ddp_backend='nccl' cannot be used here" in str(caught.value)
    assert "device of type 'cuda', and this machine shows none" in str(caught.value)
    assert "Backends that are here: gloo." in str(caught.value)
    assert "to get 'gloo'" in str(caught.value)


@pytest.mark.parametrize("name", ["mpi", "nccl", "telepathy"])
def test_a_backend_that_this_torch_lacks_is_an_error_that_lists_what_is_there(accelerator, backends, name):
    accelerator(None)
    backends("gloo")
    with pytest.raises(BackendError, match=rf"'{name}' cannot be used here: this torch was built without it.*are here: gloo\."):
        choose_backend(name, "cpu")


def test_a_backend_for_other_tensors_than_the_ranks_is_an_error(accelerator, backends):
    accelerator("cuda", 1)
    backends("gloo", "nccl")
    with pytest.raises(BackendError, match=r"moves cuda tensors, but this rank trains on 'cpu'.*ddp_backend='gloo'"):
        choose_backend("nccl", "cpu")
    backends("gloo", "nccl", "shm")
    with pytest.raises(BackendError, match=r"moves cpu tensors, but this rank trains on 'cuda'.*ddp_backend='nccl'"):
        choose_backend("shm", "cuda")


def test_only_backends_whose_device_is_here_count_as_available(accelerator, backends):
    backends("gloo", "nccl", "mpi", "xccl")
    accelerator(None)
    assert available_backends() == ["gloo", "mpi"]
    accelerator("cuda", 1)
    assert available_backends() == ["gloo", "nccl", "mpi"]


def test_a_package_of_somebody_else_can_bring_a_backend(accelerator, backends):
    accelerator(None)
    backends("gloo", "custom")
    assert choose_backend("custom", "cpu") == "custom"


# Joining.


def test_nobody_to_join_is_a_world_of_one():
    world = join(use_cpu=True, environment=WorkerEnvironment())
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert (world.device, world.backend, world.launcher) == ("cpu", "none", "none")
    assert world.is_main
    assert not dist.is_initialized()
    assert isinstance(communicator_for(None), SoloCommunicator)
    assert World(**json.loads(world.to_json())) == world


def test_a_launched_world_of_one_opens_no_connection():
    environment = WorkerEnvironment(master_addr="nowhere.invalid", master_port=1, launcher="torchrun")
    assert join(use_cpu=True, environment=environment).size == 1
    assert not dist.is_initialized()


def test_an_impossible_backend_is_told_with_one_process_too():
    with pytest.raises(BackendError, match="telepathy"):
        join(backend="telepathy", use_cpu=True, environment=WorkerEnvironment())


def test_leaving_without_having_joined_does_nothing():
    leave()
    leave()


def test_ranks_that_do_not_come_are_an_error_with_address_and_time(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # join would set it
    monkeypatch.setattr(process_group.atexit, "register", lambda function: None)
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    environment = WorkerEnvironment(
        rank=1, world_size=2, local_rank=1, local_world_size=2, master_addr="127.0.0.1", master_port=free
    )
    with pytest.raises(CollectiveError) as caught:
        join(use_cpu=True, environment=environment, timeout=timedelta(seconds=0.2))
    assert f"Rank 1 of 2 could not join the others at 127.0.0.1:{free} within 0.2 s" in str(caught.value)
    assert not dist.is_initialized()


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_nobody_can_listen_on_is_told_at_once(port):
    environment = WorkerEnvironment(rank=0, world_size=2, local_world_size=2, master_addr="127.0.0.1", master_port=port)
    with pytest.raises(LaunchVariablesError, match=rf"MASTER_PORT={port} is no port"):
        join(use_cpu=True, environment=environment)


def test_an_address_of_version_six_is_bracketed():
    assert process_group._bracketed("::1") == "[::1]"
    assert process_group._bracketed("node1") == "node1"
