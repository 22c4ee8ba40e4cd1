"""What is wrong with a machine, and what to type: facts in, problems out. Pure."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Problem", "problems_of"]

MIB = 1 << 20
LITTLE_SHM = 256 * MIB
"""Less free space than this in /dev/shm is little. Containers have 64 MiB unless told otherwise."""
FEW_FILES = 1024


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, or may become so."""

    what: str
    remedy: str
    """What to type or write, as one line."""
    broken: bool
    """True where training cannot work; False where it can, or only in part."""


def problems_of(facts: Mapping[str, Any]) -> list[Problem]:
    """Everything that is wrong, what is broken first."""
    found = [*_software(facts), *_devices(facts), *_machine(facts["machine"]), *_network(facts["network"])]
    found += [*_launchers(facts["launchers"]), *_trials(facts["trials"])]
    return sorted(found, key=lambda problem: not problem.broken)


def _software(facts: Mapping[str, Any]) -> Iterator[Problem]:
    missing = [name for name, version in facts["software"]["required"].items() if version is None]
    if missing:
        yield Problem(
            what=f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, and allstep needs it.",
            remedy=f"{shlex.quote(facts['software']['python_at'])} -m pip install {' '.join(missing)}",
            broken=True,
        )
    elif "error" in facts["torch"]:
        yield Problem(
            what=f"torch cannot be used: {facts['torch']['error']}",
            remedy=f"{shlex.quote(facts['software']['python_at'])} -c 'import torch'    # shows the whole error",
            broken=True,
        )


def _devices(facts: Mapping[str, Any]) -> Iterator[Problem]:
    machine, torch = facts["machine"], facts["torch"]
    if machine["devices_visible"] and "error" not in torch and not torch["devices"]:
        seen = f"{machine['devices_visible']} {machine['device']} device(s)"
        yield Problem(
            what=f"Linux shows {seen}, and torch {torch['version']} sees none: it is built without them, or their driver is "
            "too old for it.",
            remedy="nvidia-smi    # then install the build of torch for the version of CUDA that it shows",
            broken=True,
        )


def _machine(machine: Mapping[str, Any]) -> Iterator[Problem]:
    shm = machine["shm"]
    if shm is None or not shm["writable"]:
        state = "is not there" if shm is None else "cannot be written to"
        yield Problem(
            what=f"/dev/shm {state}: loader workers hand over their batches there, and NCCL its messages. The backend shm does "
            "not need it.",
            remedy="mount -t tmpfs -o size=1g tmpfs /dev/shm",
            broken=False,
        )
    elif shm["free"] < LITTLE_SHM:
        yield Problem(
            what=f"/dev/shm has {shm['free'] // MIB} MiB free, which loader workers can fill with a few batches, and NCCL with "
            "its messages. The backend shm does not need it.",
            remedy="docker run --shm-size=1g ...    # outside of containers: mount -o remount,size=1g /dev/shm",
            broken=False,
        )
    files = machine["limits"]["nofile"]
    if files["soft"] is not None and files["soft"] < FEW_FILES:
        yield Problem(
            what=f"A process may have {files['soft']} files open; ranks, loader workers and sockets need more.",
            remedy=f"ulimit -n {min(files['hard'] or 65536, 65536)}",
            broken=False,
        )
    locked = machine["limits"]["memlock"]["soft"]
    if machine["devices_visible"] and locked is not None and locked < 64 * MIB:
        yield Problem(
            what=f"A process may lock {locked // 1024} KiB of memory; NCCL over InfiniBand needs more.",
            remedy="ulimit -l unlimited    # in a container: docker run --ulimit memlock=-1",
            broken=False,
        )


def _network(network: Mapping[str, Any]) -> Iterator[Problem]:
    if "lo" not in network["interfaces"] or "127.0.0.1" not in network["interfaces"]["lo"]:
        yield Problem(
            what="There is no loopback interface with 127.0.0.1, on which the ranks of one host meet.",
            remedy="ip link set lo up",
            broken=True,
        )
    if network["free_port_error"]:
        yield Problem(what=network["free_port_error"], remedy="sysctl net.ipv4.ip_local_port_range", broken=True)
    if network["localhost"] is None:
        yield Problem(what="localhost stands for no address.", remedy="echo '127.0.0.1 localhost' >> /etc/hosts", broken=False)
    if network["hostname_is"] is None:
        name = network["hostname"]
        yield Problem(
            what=f"The name of this host, {name}, stands for no address. On one host that does no harm; on several, gloo needs "
            "to know its interface.",
            remedy="export GLOO_SOCKET_IFNAME=" + next((i for i in network["interfaces"] if i != "lo"), "eth0"),
            broken=False,
        )


def _launchers(launchers: Mapping[str, Any]) -> Iterator[Problem]:
    seen = launchers["variables"]
    if launchers["error"]:
        names = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in seen]
        yield Problem(
            what=f"Training would be refused in this shell: {launchers['error']}",
            remedy=f"unset {' '.join(names)}" if names else "env | grep -E 'SLURM|OMPI|PMI'    # and see the message above",
            broken=True,
        )
    elif seen.get("SLURM_NTASKS", "1") != "1" and launchers["launcher"] == "none":
        yield Problem(
            what=f"This SLURM allocation has {seen['SLURM_NTASKS']} tasks, but this is no step of it: `python train.py` trains "
            "in one process here.",
            remedy="srun python train.py",
            broken=False,
        )


def _trials(trials: list[Mapping[str, Any]]) -> Iterator[Problem]:
    for trial in trials:
        if trial["ok"] is False:
            yield Problem(
                what=f"Two ranks over {trial['backend']} failed: {trial['error']}",
                remedy=f"allstep launch --num_processes 2 -m allstep.comm.selftest {trial['backend']}    # shows all of it",
                broken=True,
            )
