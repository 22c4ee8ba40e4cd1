"""The report of `allstep doctor` as text: facts and problems in, lines out. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from allstep.cli.doctor.problems import Problem

__all__ = ["lines_of"]

Rows = list[tuple[str, str]]

_GIB = 1 << 30


def lines_of(facts: Mapping[str, Any], problems: Sequence[Problem]) -> Iterator[str]:
    """The lines of the whole report."""
    sections = {
        "Software": _software(facts["software"], facts["torch"]),
        "Machine": _machine(facts["machine"], facts["torch"]),
        "Network": _network(facts["network"]),
        "Launchers": _launchers(facts["launchers"]),
        "What `allstep launch SCRIPT` would do here": [(row[0], f"{row[1]}  ({row[2]})") for row in facts["launch"]],
        "Two ranks over each backend": [(trial["backend"], _trial(trial)) for trial in facts["trials"]],
    }
    for title, rows in sections.items():
        if not rows:
            continue
        yield title
        width = max(len(name) for name, _ in rows)
        yield from (f"  {name:<{width}}  {value}" for name, value in rows)
        yield ""
    broken = sum(problem.broken for problem in problems)
    if not problems:
        yield "Nothing is wrong."
        return
    for problem in problems:
        yield f"{'BROKEN' if problem.broken else 'note'}: {problem.what}"
        yield f"    {problem.remedy}"
    yield ""
    yield f"{broken} broken, {len(problems) - broken} to know of." if broken else "Nothing is broken."


def _software(software: Mapping[str, Any], torch: Mapping[str, Any]) -> Rows:
    optional = [f"{name} {version}" for name, version in software["optional"].items() if version]
    missing = [name for name, version in software["optional"].items() if not version]
    cuda = f", CUDA {torch['cuda']}" if torch.get("cuda") else ", without CUDA"
    return [
        ("allstep", f"{software['allstep']}  ({software['allstep_at']})"),
        ("Python", f"{software['python']}  ({software['python_at']})"),
        ("torch", f"cannot be used: {torch['error']}" if "error" in torch else f"{torch['version']}{cuda}"),
        ("optional", ", ".join(optional) or "none"),
        ("not there", ", ".join(missing) or "none"),
    ]


def _machine(machine: Mapping[str, Any], torch: Mapping[str, Any]) -> Rows:
    shm, memory = machine["shm"], machine["memory"]
    return [
        ("host", f"{machine['host']}: {machine['system']}"),
        ("devices", ", ".join(torch.get("devices", ())) or "the CPU only"),
        ("backends", ", ".join(torch.get("backends", ())) or "none"),
        ("cores", f"{machine['cores_job']} for this job, of {machine['cores']} (affinity {machine['cores_affinity']})"),
        ("memory", f"{_size(memory['available'])} free of {_size(memory['total'])}"),
        ("/dev/shm", f"{_size(shm['free'])} free of {_size(shm['size'])}" if shm else "not there"),
        ("limits", ", ".join(f"{name} {_limit(name, limit['soft'])}" for name, limit in machine["limits"].items())),
    ]


def _network(network: Mapping[str, Any]) -> Rows:
    rows = [(name, " ".join(addresses) or "no address") for name, addresses in network["interfaces"].items()]
    rows.append(("localhost", " ".join(network["localhost"] or ()) or "stands for no address"))
    rows.append((network["hostname"], " ".join(network["hostname_is"] or ()) or "stands for no address"))
    rows.append(("a free port", str(network["free_port"] or network["free_port_error"])))
    return rows


def _launchers(launchers: Mapping[str, Any]) -> Rows:
    rows = list(launchers["variables"].items())
    if launchers["error"]:
        said = "training would be refused, see below"
    elif launchers["launcher"] == "none":
        said = "nobody launched this shell: `python train.py` trains in one process"
    else:
        said = f"rank {launchers['rank']} of {launchers['world_size']}, by {launchers['launcher']}"
    return [*rows, ("in sum", said)]


def _trial(trial: Mapping[str, Any]) -> str:
    if trial["skipped"]:
        return f"not tried: {trial['skipped']}"
    if trial["ok"]:
        return f"well: joined and added up, in {trial['seconds']} s with start and imports"
    return f"FAILED after {trial['seconds']} s"


def _size(number: int | None) -> str:
    return "?" if number is None else f"{number / _GIB:.1f} GiB"


def _limit(name: str, number: int | None) -> str:
    if number is None:
        return "unlimited"
    return f"{number // 1024} KiB" if name in ("memlock", "core") and number else str(number)
