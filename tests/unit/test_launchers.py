"""The variables of SLURM, MPI and Kubeflow, as recorded from them: who a process is, where rank 0 listens, contradictions."""

import os
import subprocess
import sys

import pytest

from allstep.environment import WorkerEnvironment
from allstep.errors import LaunchVariablesError
from allstep.launchers.ancestors import ancestors, pid_of_ancestor
from allstep.launchers.found import port_of
from allstep.launchers.slurm import expand_counts, expand_hosts

EPHEMERAL = 32768
"""First of the ports that Linux gives to outgoing connections."""

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_NODELIST": "gpu[07-09]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "4(x3)",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
"""The last task of `srun -N 2 -n 3` in an allocation of three nodes."""

BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "4711"}
"""A batch script, which has no step."""

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "2020802561",
    "OMPI_MCA_ess_base_jobid": "2020802561",
}
"""Rank 1 of `mpirun -np 2` of Open MPI 4.1."""

MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
"""Rank 1 of `mpirun -n 2` of MPICH 4.0."""

INTEL = {**MPICH, "I_MPI_HYDRA_UUID": "3f2b0000-1d2e-5c3a-0d04-060034120000", "I_MPI_MPIRUN": "mpirun"}
MVAPICH2 = {f"MV2_{name[5:]}": value for name, value in OPENMPI.items() if name.startswith("OMPI_COMM")} | {"MPIRUN_ID": "77"}

POD = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "3",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}
"""A worker of a PyTorchJob."""


def read(variables, proxy=None):
    return WorkerEnvironment.from_variables(variables, ancestor=lambda program: proxy)


def refused(variables):
    with pytest.raises(LaunchVariablesError) as caught:
        read(variables)
    return str(caught.value)


# SLURM.


def test_a_task_of_a_step_is_read_from_the_step_and_not_from_its_job():
    environment = read(STEP)
    assert (environment.rank, environment.world_size) == (2, 3)
    assert (environment.local_rank, environment.local_world_size) == (0, 1)
    assert (environment.master_addr, environment.launcher) == ("gpu08", "slurm")
    first = read({**STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})
    assert (first.local_rank, first.local_world_size) == (1, 2)
    assert first.master_port == environment.master_port


def test_a_step_smaller_than_its_job_has_its_own_size():
    assert read({**STEP, "SLURM_NTASKS": "12"}).world_size == 3


def test_a_step_on_one_node_needs_no_names():
    variables = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu08", "SLURM_LOCALID": "2"}
    environment = read(variables)
    assert (environment.master_addr, environment.local_rank, environment.local_world_size) == ("127.0.0.1", 2, 3)


@pytest.mark.parametrize(
    "variables",
    [
        {name: value for name, value in STEP.items() if name not in ("SLURM_STEP_ID", "SLURM_PROCID")},
        BATCH,
        {**STEP, "SLURM_PTY_PORT": "41001"},
    ],
    ids=["the shell of salloc", "a batch script", "srun --pty bash"],
)
def test_what_is_no_task_of_a_step_is_one_process(variables):
    assert read(variables) == WorkerEnvironment()


def test_an_address_and_a_port_that_the_user_chose_are_kept():
    environment = read({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (environment.master_addr, environment.master_port, environment.rank) == ("10.0.0.1", 1234, 2)


def test_jobs_and_steps_have_ports_of_their_own_below_those_of_connections():
    ports = [
        read({**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(4711, 4731)
        for step in range(3)
    ]
    assert len({*ports}) == 60
    assert all(1024 < port < EPHEMERAL for port in ports)


def test_a_step_that_does_not_tell_its_tasks_per_node_is_refused():
    hidden = {name: value for name, value in STEP.items() if "TASKS_PER_NODE" not in name}
    assert "SLURM_STEP_TASKS_PER_NODE='' does not tell the tasks on node SLURM_NODEID=1" in refused(hidden)
    assert "'two' is no list of tasks per node" in refused({**STEP, "SLURM_STEP_TASKS_PER_NODE": "two"})


def test_a_step_without_a_list_of_nodes_says_what_to_export():
    hidden = {name: value for name, value in STEP.items() if not name.endswith("NODELIST")}
    text = refused(hidden)
    assert "SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=3: slurm started 3 processes, 1 of them on this host" in text
    assert "MASTER_ADDR is missing. To set it, export MASTER_ADDR=HOST_OF_RANK_0" in text


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("a,b[1,3],c-d[09-10].x", ["a", "b1", "b3", "c-d09.x", "c-d10.x"]),
        ("rack[1-2]n[0-1]", ["rack1n0", "rack1n1", "rack2n0", "rack2n1"]),
        ("", []),
    ],
)
def test_lists_of_nodes_are_expanded(listed, names):
    assert expand_hosts(listed) == names


def test_lists_of_tasks_are_expanded():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("8") == [8]


# MPI.


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [("openmpi", OPENMPI), ("mpich", MPICH), ("intel mpi", INTEL), ("mvapich2", MVAPICH2)],
)
def test_ranks_of_one_host_meet_on_it_at_a_port_that_follows_from_the_job(launcher, variables):
    environment = read(variables, proxy=5261)
    assert (environment.rank, environment.world_size, environment.local_rank, environment.local_world_size) == (1, 2, 1, 2)
    assert (environment.launcher, environment.master_addr) == (launcher, "127.0.0.1")
    assert 1024 < environment.master_port < EPHEMERAL


def test_two_jobs_have_two_ports():
    assert read(OPENMPI).master_port != read({**OPENMPI, "PMIX_NAMESPACE": "2020802562"}).master_port
    assert read(MPICH, proxy=5261).master_port != read(MPICH, proxy=5262).master_port


def test_where_nothing_names_the_job_the_line_to_type_is_told():
    assert "MASTER_PORT is missing. To set it, write `mpirun -genv MASTER_ADDR 127.0.0.1 -genv MASTER_PORT" in refused(MPICH)


@pytest.mark.parametrize(
    ("variables", "local", "line"),
    [
        (OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "`mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500 ...`"),
        (MPICH, "MPI_LOCALNRANKS", "`mpirun -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT 29500 ...`"),
    ],
    ids=["openmpi", "mpich"],
)
def test_on_several_hosts_the_address_must_be_told(variables, local, line):
    name, rank = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK") if "OMPI" in local else ("PMI_SIZE", "MPI_LOCALRANKID")
    several = {**variables, name: "4", local: "2", rank: "1"}
    text = refused(several)
    assert "started 4 processes, 2 of them on this host, but does not tell where rank 0 listens" in text
    assert line in text
    told = read({**several, "MASTER_ADDR": "gpu08", "MASTER_PORT": "29500"})
    assert (told.master_addr, told.master_port, told.world_size, told.local_world_size) == ("gpu08", 29500, 4, 2)


def test_one_process_needs_no_address():
    alone = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    assert (read(alone).world_size, read(alone).launcher) == (1, "mpich")


def test_a_job_that_does_not_tell_its_local_ranks_is_refused():
    assert "MPI_LOCALRANKID and MPI_LOCALNRANKS" in refused({"PMI_RANK": "0", "PMI_SIZE": "2"})


def test_a_step_that_started_the_daemons_of_mpirun_is_not_the_job():
    daemons = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "1"}
    assert read({**daemons, **OPENMPI}).launcher == "openmpi"


def test_srun_that_speaks_pmi_is_still_a_step():
    """As `srun --mpi=pmi2` of SLURM 22.05 sets them."""
    assert read({**STEP, "PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "13", "PMI_JOBID": "4711.0"}).launcher == "slurm"


def test_ranks_below_the_daemons_of_mpirun_inherit_a_step_that_is_not_theirs():
    """As seen in an allocation of two nodes: four ranks, and a step of the two daemons."""
    daemon = {
        **STEP,
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    rank = {**OPENMPI, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "gpu08"}
    environment = read({**daemon, **rank})
    assert (environment.rank, environment.world_size, environment.local_rank) == (3, 4, 1)
    assert (environment.launcher, environment.master_addr) == ("openmpi", "gpu08")


# RANK and WORLD_SIZE beside them.

WORDS = {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("below", [{"TORCHELASTIC_RUN_ID": "x"}, {"ALLSTEP_RUN_ID": "x"}], ids=["torchrun", "allstep"])
def test_a_launcher_below_slurm_or_mpi_wins(below):
    for above in (STEP, OPENMPI, {**STEP, "SLURM_STEP_NUM_TASKS": "99"}, {"PMI_RANK": "0", "PMI_SIZE": "2"}):
        environment = read({**above, **WORDS, **below})
        assert (environment.rank, environment.world_size, environment.master_addr) == (3, 6, "a")


def test_numbers_taken_over_from_slurm_by_hand_agree_with_it():
    environment = read({**STEP, **WORDS, "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    assert (environment.rank, environment.launcher) == (2, "variables")


def test_each_task_may_start_several_ranks_by_hand():
    assert (read({**STEP, **WORDS}).rank, read({**STEP, **WORDS}).launcher) == (3, "variables")


def test_the_rank_may_be_left_to_slurm():
    environment = read({**STEP, "WORLD_SIZE": "3", "MASTER_ADDR": "b", "MASTER_PORT": "29501"})
    assert (environment.rank, environment.launcher, environment.master_addr) == (2, "slurm", "b")


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({**WORDS, "RANK": "0", "WORLD_SIZE": "3"}, "RANK=0, WORLD_SIZE=3, but slurm says SLURM_PROCID=2"),
        ({**WORDS, "RANK": "1", "WORLD_SIZE": "2"}, "RANK=1, WORLD_SIZE=2, but slurm says SLURM_PROCID=2"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK=0, WORLD_SIZE=1, but slurm says SLURM_PROCID=2"),
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE=1, but slurm says SLURM_PROCID=2"),
        ({"RANK": "0"}, "RANK=0, but slurm says SLURM_PROCID=2"),
    ],
)
def test_numbers_that_contradict_slurm_are_named_with_its_own(own, said):
    text = refused({**STEP, **own})
    assert said in text
    assert "SLURM_STEP_NUM_TASKS=3" in text
    assert "to believe slurm, or unset SLURM_PROCID and SLURM_STEP_NUM_TASKS" in text


# Kubeflow.


def test_each_pod_of_a_job_is_a_host_of_its_own():
    environment = read(POD)
    assert (environment.rank, environment.world_size, environment.launcher) == (1, 3, "kubeflow")
    assert (environment.local_rank, environment.local_world_size) == (0, 1)


def test_one_process_in_a_pod_that_should_have_four_is_refused():
    text = refused({**POD, "PET_NPROC_PER_NODE": "4"})
    assert "PET_NPROC_PER_NODE=4" in text
    assert "torchrun SCRIPT" in text


# The processes above.


def test_the_processes_above_are_read_nearest_first():
    code = "from allstep.launchers.ancestors import ancestors\nfor one in ancestors(2): print(one.pid, one.command)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    with open("/proc/self/cmdline") as file:
        own = tuple(file.read().split("\0")[:-1])
    assert said[0] == f"{os.getpid()} {own}"
    assert said[1].startswith(f"{os.getppid()} ")


def test_what_cannot_be_read_ends_the_list(tmp_path):
    assert list(ancestors(root=str(tmp_path))) == []
    (tmp_path / "proc" / str(os.getppid())).mkdir(parents=True)
    (tmp_path / "proc" / str(os.getppid()) / "cmdline").write_bytes(b"my prog\0-x\0")
    (tmp_path / "proc" / str(os.getppid()) / "stat").write_text(f"{os.getppid()} (a) b) (c) S 0 1 1")
    assert [one.command for one in ancestors(root=str(tmp_path))] == [("my prog", "-x")]
    assert pid_of_ancestor("no such program") is None


def test_a_job_has_one_port():
    assert port_of("a") == port_of("a") != port_of("b")
    assert port_of(1) + 1 == port_of(2)
