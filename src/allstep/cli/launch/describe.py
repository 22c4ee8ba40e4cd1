"""What settings come to, as rows of a table. Pure."""

from collections.abc import Mapping

from allstep.launch.plan import Machine, is_elastic, machines_of, ranks_here
from allstep.launch.settings import SETTINGS, Value

__all__ = ["described"]


def described(resolved: Mapping[str, Value], machine: Machine) -> list[tuple[str, str, str]]:
    """Name, value and origin of every setting that has a value, and of what follows from them on this machine.

    Raises:
        ArgumentsError: settings contradict one another.
    """
    rows = [(name, str(resolved[name].value), resolved[name].origin) for name in (setting.name for setting in SETTINGS)]
    rows = [row for row in rows if row[1] != "None"]
    fewest, most = machines_of(resolved)
    here = ranks_here(resolved, machine)
    ranks = f"{here * most}" if fewest == most else f"{here * fewest} to {here * most}"
    sight = f"{machine.gpus} GPU{'' if machine.gpus == 1 else 's'} in sight"
    cores = f"{machine.cores} core{'' if machine.cores == 1 else 's'}"
    rows.append(("ranks here", str(here), f"{sight}, {cores}"))
    rows.append(("ranks", ranks, "torch's elastic agent starts them" if is_elastic(resolved) else "this launcher starts them"))
    return rows
