"""How a launch ended: one object for a program, from which the report for a person is written."""

import json
import signal
from dataclasses import asdict, dataclass

from allstep.launch.job import JobState, Machine, RankState, StopNote
from allstep.launch.record import FailureRecord
from allstep.launch.verdict import Outcome, first_failure, interrupted_by, outcome, stop_note

__all__ = ["LaunchResult", "RankEnd"]


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    outcome: Outcome
    exit_code: int | None
    """As subprocess gives it: minus the signal where one ended it. None: the kernel could not end it, or nobody knows."""
    ended_at: float | None
    """When its end was seen, unix seconds."""
    machine: int = 0
    """Number of its host."""
    record: FailureRecord | None = None
    stop: StopNote | None = None
    """What it said when it was asked to stop and did so in order."""
    hung: bool = False
    """It failed, did not end after that, and was killed."""
    left_processes: bool = False
    """It finished, but left processes behind, which were ended."""
    oom_kills: int | None = None
    """See `RankState.oom_kills`."""


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """How a launch ended."""

    exit_code: int
    """0; that of the rank that failed first (128 + signal where one killed it, 1 where its host was lost or it left without an
    error); 143 where the job was asked to stop by SIGTERM or SIGUSR1, 130 after Ctrl-C, 129 after SIGHUP."""
    ranks: tuple[RankEnd, ...]
    """Those of all hosts."""
    host: str
    """Name of this host; on several, of machine 0."""
    started_at: float
    """Unix seconds."""
    ended_at: float
    """Unix seconds."""
    machines: tuple[Machine, ...] = ()
    """The hosts, where there are several."""
    interrupted_by: int | None = None
    """The signal that ended the job, to the launcher, or to a rank that then stopped all in order."""
    asked_to_stop: bool = False
    """A launcher got such a signal, be it after a failure."""
    stop: StopNote | None = None
    """What the ranks said that stopped in order."""
    earlier: tuple[str, ...] = ()
    """The failures after which the ranks were started again, each in a line."""
    logs: tuple[str, ...] = ()
    """Files with the output of ranks other than 0 that were kept."""
    tail: tuple[str, ...] = ()
    """Last lines that the rank which failed first wrote to its file."""

    @classmethod
    def of(
        cls,
        job: JobState,
        *,
        host: str,
        started_at: float,
        ended_at: float,
        logs: tuple[str, ...] = (),
        tail: tuple[str, ...] = (),
    ) -> "LaunchResult":
        """The result of the ended `job`."""
        first, interrupt = first_failure(job), interrupted_by(job)
        return cls(
            exit_code=_exit_status(first) if first else _after(interrupt) if interrupt else 0,
            ranks=tuple(_rank_end(job, state) for state in job.ranks),
            host=host,
            started_at=started_at,
            ended_at=ended_at,
            machines=job.machines,
            interrupted_by=interrupt,
            asked_to_stop=bool(job.requests),
            stop=stop_note(job) if first is None else None,
            logs=logs,
            tail=tail,
        )

    @classmethod
    def before_any_rank(cls, number: int, *, host: str, started_at: float, ended_at: float) -> "LaunchResult":
        """The result of a launch that the signal `number` ended while it waited for other hosts."""
        return cls(
            exit_code=_after(number),
            ranks=(),
            host=host,
            started_at=started_at,
            ended_at=ended_at,
            interrupted_by=number,
            asked_to_stop=True,
        )

    @property
    def first_failure(self) -> RankEnd | None:
        """The rank that failed first; None where none failed by itself."""
        return next((end for end in self.ranks if end.outcome is Outcome.FAILED_FIRST), None)

    @property
    def calls_for_restart(self) -> bool:
        """Whether the ranks failed, and starting all of them again may help: nobody asked to stop, and all hosts are there."""
        asked = self.asked_to_stop or any(end.stop is not None for end in self.ranks)
        lost = any(machine.lost_at is not None for machine in self.machines)
        ended = all(end.exit_code is not None for end in self.ranks)
        return self.first_failure is not None and ended and not asked and not lost

    def host_of(self, end: RankEnd) -> str:
        """Name of the host of a rank."""
        return next((each.host for each in self.machines if each.machine == end.machine), self.host)

    def to_json(self) -> str:
        """One line of JSON, for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "LaunchResult":
        """The same object that wrote `text`."""
        fields = json.loads(text)
        for end in fields["ranks"]:
            record = end["record"]
            end["record"] = FailureRecord.from_fields(record) if record is not None else None
            end["outcome"] = Outcome(end["outcome"])
            end["stop"] = StopNote(**end["stop"]) if end["stop"] else None
        return cls(
            **{
                **fields,
                "ranks": tuple(RankEnd(**end) for end in fields["ranks"]),
                "machines": tuple(Machine(**machine) for machine in fields["machines"]),
                "stop": StopNote(**fields["stop"]) if fields["stop"] else None,
                **{name: tuple(fields[name]) for name in ("earlier", "logs", "tail")},
            }
        )


def _rank_end(job: JobState, state: RankState) -> RankEnd:
    how = outcome(job, state)
    return RankEnd(
        rank=state.rank,
        outcome=how,
        exit_code=state.exit_code,
        ended_at=state.ended_at,
        machine=state.machine,
        record=state.record,
        stop=state.stop if state.stopped_in_order else None,
        hung=state.record is not None and signal.SIGKILL in state.received and state.exit_code in (None, -signal.SIGKILL),
        left_processes=how is Outcome.FINISHED and bool(state.sent) and not state.received,
        oom_kills=state.oom_kills,
    )


def _exit_status(first: RankState) -> int:
    code = first.exit_code
    if code is None or -code in first.received:  # its exception is the failure; it hung on its way out
        return 1
    return 128 - code if code < 0 else code or 1


def _after(number: int) -> int:
    """The exit status of a job that a signal stopped. Schedulers send SIGUSR1 as an early SIGTERM, and mean the same by it."""
    return 128 + (signal.SIGTERM if number == signal.SIGUSR1 else number)
