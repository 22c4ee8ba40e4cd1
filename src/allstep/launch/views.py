"""What launchers of one job tell one another about their ranks, and one picture from all of it. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from allstep.launch.job import JobState, Machine, RankState, Request, StopNote, shifted
from allstep.launch.record import FailureRecord

__all__ = ["NOTHING", "View", "lost", "merged", "told"]


@dataclass(frozen=True, kw_only=True)
class View:
    """What another launcher told last, by the clock of this one."""

    ranks: tuple[RankState, ...]
    machines: tuple[Machine, ...]
    requests: tuple[Request, ...] = ()
    stopped_at: float | None = None
    tail: tuple[str, ...] = ()

    @classmethod
    def of(cls, message: Mapping[str, Any], machines: Iterable[int], now: float) -> "View":
        """What `message` says of some `machines`, of which its sender knows, heard at the time `now`.

        Raises:
            KeyError, TypeError, ValueError: it is not from `told`.
        """
        wanted, ahead = set(machines), now - float(message["now"])
        stopped_at = message["stopped_at"]
        return cls(
            ranks=tuple(shifted(_rank(each), ahead) for each in message["ranks"] if each["machine"] in wanted),
            machines=tuple(_machine(each, ahead) for each in message["machines"] if each["machine"] in wanted),
            requests=tuple(
                Request(**{**each, "time": each["time"] + ahead}) for each in message["requests"] if each["machine"] in wanted
            ),
            stopped_at=None if stopped_at is None else stopped_at + ahead,
            tail=tuple(str(line) for line in message["tail"]),
        )


NOTHING = View(ranks=(), machines=())


def told(job: JobState, tail: tuple[str, ...] = ()) -> dict[str, Any]:
    """What to tell others of `job`; they need the time at which it is sent as well, under "now"."""
    return {
        "ranks": [_told_rank(state) for state in job.ranks],
        "machines": [asdict(machine) for machine in job.machines],
        "requests": [asdict(request) for request in job.requests],
        "stopped_at": job.stopped_at,
        "tail": list(tail),
    }


def merged(job: JobState, views: Iterable[View]) -> JobState:
    """`job` with what others told: they know best about their own ranks, and this launcher about its own."""
    views = list(views)
    ranks = {state.rank: state for view in views for state in view.ranks}
    machines = {machine.machine: machine for view in views for machine in view.machines}
    own = [request for request in job.requests if request.machine == job.machine]
    requests = sorted([*own, *(request for view in views for request in view.requests)], key=lambda request: request.time)
    stops = [time for time in (job.stopped_at, *(view.stopped_at for view in views)) if time is not None]
    return replace(
        job,
        ranks=tuple(ranks.get(state.rank, state) for state in job.ranks),
        machines=tuple(machines.get(machine.machine, machine) for machine in job.machines),
        requests=tuple(requests),
        stopped_at=min(stops, default=None),
    )


def lost(job: JobState, machines: Iterable[int], *, heard: float, now: float, because: str) -> View:
    """What is known of some hosts after the one that told of them is gone, last heard of at the time `heard`."""
    gone = set(machines)
    ranks = (state for state in job.ranks if state.machine in gone)
    return View(
        ranks=tuple(replace(state, lost_at=heard, failed_at=now) if state.running else state for state in ranks),
        machines=tuple(
            replace(each, lost_at=heard, lost_because=because) if each.lost_at is None else each
            for each in job.machines
            if each.machine in gone
        ),
        requests=tuple(request for request in job.requests if request.machine in gone),
        stopped_at=job.stopped_at,
    )


def _told_rank(state: RankState) -> dict[str, Any]:
    # A traceback may be long, and is in the output of the rank; what the report shows goes along.
    record = replace(state.record, traceback="") if state.record else None
    return asdict(replace(state, record=record))


def _rank(fields: Mapping[str, Any]) -> RankState:
    record, stop = fields["record"], fields["stop"]
    return RankState(
        **{
            **fields,
            "record": FailureRecord.from_fields(record) if record is not None else None,
            "stop": StopNote(**stop) if stop is not None else None,
            "sent": tuple(fields["sent"]),
            "received": tuple(fields["received"]),
        }
    )


def _machine(fields: Mapping[str, Any], ahead: float) -> Machine:
    lost_at = fields["lost_at"]
    return Machine(**{**fields, "lost_at": None if lost_at is None else lost_at + ahead})
