import os
import subprocess
import sys

import pytest

from allstep.launch.generation import Generation
from allstep.launch.variables import LAUNCHER_PID, glibc_version, job_variables, steady_memory

MALLOC = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}


def generation(number=0, machine=0):
    return Generation(
        number=number,
        run_id="x",
        counts=(2, 1),
        hosts=("a", "b"),
        machine=machine,
        master_addr="10.0.0.1",
        master_port=7,
        max_restarts=3,
    )


def given(variables, *, threads=None, gpus=0, glibc=(2, 36), number=0, machine=0, interface=None):
    return job_variables(
        variables,
        generation=generation(number, machine),
        launcher_pid=7,
        threads=threads,
        gpus=gpus,
        glibc=glibc,
        interface=interface,
    )


def test_every_rank_is_told_of_its_job_and_its_launcher():
    own = given({}, threads=3)
    assert (own["ALLSTEP_RUN_ID"], own[LAUNCHER_PID], own["OMP_NUM_THREADS"]) == ("x", "7", "3")
    assert "OMP_NUM_THREADS" not in given({})


def test_a_rank_knows_its_host_and_how_often_the_job_was_started_again():
    own = given({}, number=2, machine=1)
    assert (own["GROUP_RANK"], own["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert (own["ALLSTEP_RESTART_COUNT"], own["TORCHELASTIC_RESTART_COUNT"], own["ALLSTEP_MAX_RESTARTS"]) == ("2", "2", "3")
    assert own["ALLSTEP_RUN_ID"] == "x.2"
    assert given({})["ALLSTEP_RUN_ID"] == "x"


def test_gloo_is_told_the_interface_to_other_hosts_unless_the_user_did():
    assert "GLOO_SOCKET_IFNAME" not in given({})
    assert given({}, interface="eth1")["GLOO_SOCKET_IFNAME"] == "eth1"
    assert given({"GLOO_SOCKET_IFNAME": "ib0"}, interface="eth1")["GLOO_SOCKET_IFNAME"] == "ib0"


def test_what_the_user_set_stays():
    own = given({"PYTHONUNBUFFERED": "x", "ACCELERATE_USE_CPU": "0"})
    assert (own["PYTHONUNBUFFERED"], own["ACCELERATE_USE_CPU"]) == ("x", "0")


def test_ranks_on_gpus_are_not_told_how_to_use_the_cpu():
    assert {"ACCELERATE_USE_CPU", *MALLOC} <= given({}).keys()
    assert not {"ACCELERATE_USE_CPU", *MALLOC} & given({}, gpus=1).keys()


@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_ARENA_MAX": "2"},
        {"MALLOC_CONF": "dirty_decay_ms:0"},
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        {"LD_PRELOAD": "/usr/lib/libtcmalloc_minimal.so.4"},
    ],
)
def test_memory_is_left_to_a_user_who_chose_for_it(variables):
    assert steady_memory(variables, (2, 36)) == {}


def test_variables_that_do_not_speak_of_memory_change_nothing():
    others = {"GLIBC_TUNABLES": "glibc.rtld.nns=8", "LD_PRELOAD": "/usr/lib/libgomp.so.1", "PATH": "/malloc"}
    assert steady_memory(others, (2, 36)) == steady_memory({}, (2, 36)) != {}


def test_a_threshold_that_an_older_glibc_refuses_is_not_given_to_it():
    sizes = [int(steady_memory({}, version)["MALLOC_MMAP_THRESHOLD_"]) for version in ((2, 17), (2, 31), (2, 36), (3, 0))]
    assert sizes == [32 << 20, 32 << 20, 1 << 30, 1 << 30]


def test_another_c_library_is_given_no_settings_of_glibc():
    assert steady_memory({}, None) == {}


@pytest.mark.parametrize(
    ("said", "version"),
    [("glibc 2.36", (2, 36)), ("glibc 2.31.9000", (2, 31)), ("musl 1.2", None), ("", None), (None, None)],
)
def test_the_c_library_is_known_by_its_own_words(monkeypatch, said, version):
    monkeypatch.setattr(os, "confstr", lambda _: said)
    assert glibc_version() == version


def test_a_c_library_that_does_not_know_the_question_is_another_one(monkeypatch):
    def refuse(_):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", refuse)
    assert glibc_version() is None


FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
def use():
    blocks = [libc.malloc(4 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 4 << 20)
    for block in blocks:
        libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


@pytest.mark.skipif(glibc_version() is None, reason="the C library is not glibc")
def test_a_process_with_the_settings_uses_the_same_memory_again():
    """32 MiB in blocks of 4, used and freed again and again: what the gradients of a model do."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def faults(variables):
        done = subprocess.run(
            [sys.executable, "-c", FAULTS], env={**clean, **variables}, check=True, capture_output=True, text=True
        )
        return float(done.stdout)

    assert faults(steady_memory({}, glibc_version())) < 100
    assert faults({}) > 1000  # it is still worth it
