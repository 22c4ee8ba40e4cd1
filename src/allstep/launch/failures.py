"""How a launch ended, and the report that a person reads when it did not end well."""

import json
import os
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from allstep.launch.decide import JobState, Outcome, RankState, first_failure, interrupted_by, outcome
from allstep.launch.record import FailureRecord

__all__ = ["LaunchResult", "RankEnd", "report"]

MOST_FRAMES = 4
"""User frames in the report; the traceback above it has all of them."""
MOST_LINES = 14
"""Lines of one message in the report. The first and the last say most: a loader's worker puts its own error at the end."""

_HINTS = {
    signal.SIGKILL: "perhaps the system ran out of memory; the launcher did not send it",
    signal.SIGTERM: "the launcher did not send it",
    signal.SIGSEGV: "a crash in native code; its Python stack is in the output of the rank",
    signal.SIGBUS: "perhaps shared memory (/dev/shm) is full",
    signal.SIGABRT: "native code gave up; its reason is in the output of the rank. torch can end so where a rank leaves "
    "without torch.distributed.destroy_process_group()",
}
_INTERRUPTED = 128 + signal.SIGINT
_SOURCE_PLACE = re.compile(r"\[\S+:\d+\] ")
"""Where in its own C++ source a library raised: noise in a line about a consequence."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    outcome: Outcome
    exit_code: int | None
    """As subprocess gives it: minus the signal where one ended it. None: the kernel could not end it."""
    ended_at: float | None
    """When its end was seen, unix seconds."""
    record: FailureRecord | None = None
    hung: bool = False
    """It failed, did not end after that, and was killed."""
    left_processes: bool = False
    """It finished, but left processes behind, which were ended."""


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """How a launch ended."""

    exit_code: int
    """0; that of the rank that failed first (128 + signal where one killed it); 128 + signal after Ctrl-C and its like."""
    ranks: tuple[RankEnd, ...]
    host: str
    started_at: float
    """Unix seconds."""
    ended_at: float
    """Unix seconds."""
    interrupted_by: int | None = None
    """The signal to the launcher that ended the job."""
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
        exit_code = _exit_status(first) if first else 128 + interrupt if interrupt else 0
        ends = tuple(
            RankEnd(
                rank=state.rank,
                outcome=outcome(job, state),
                exit_code=state.exit_code,
                ended_at=state.ended_at,
                record=state.record,
                hung=state.record is not None
                and signal.SIGKILL in state.received
                and state.exit_code in (None, -signal.SIGKILL),
                left_processes=outcome(job, state) is Outcome.FINISHED and bool(state.sent) and not state.received,
            )
            for state in job.ranks
        )
        return cls(
            exit_code=exit_code,
            ranks=ends,
            host=host,
            started_at=started_at,
            ended_at=ended_at,
            interrupted_by=interrupt,
            logs=logs,
            tail=tail,
        )

    @property
    def first_failure(self) -> RankEnd | None:
        """The rank that failed first; None where none failed by itself."""
        return next((end for end in self.ranks if end.outcome is Outcome.FAILED_FIRST), None)

    def to_json(self) -> str:
        """One line of JSON, for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "LaunchResult":
        """The same object that wrote `text`."""
        fields = json.loads(text)
        for end in fields["ranks"]:
            record = end["record"]
            end["record"] = FailureRecord.from_json(json.dumps(record)) if record is not None else None
            end["outcome"] = Outcome(end["outcome"])
        ranks = tuple(RankEnd(**end) for end in fields["ranks"])
        return cls(**{**fields, "ranks": ranks, "logs": tuple(fields["logs"]), "tail": tuple(fields["tail"])})


def report(result: LaunchResult, folder: str = "") -> str:
    """What to print at the end of a launch: the story of its failure; empty where all went well.

    Args:
        folder: paths below it are shown relative to it; usually the working folder.
    """
    first = result.first_failure
    if first is not None:
        lines = [*_tail(result, first), *_headline(result, first), *_indented(_details(result, first, folder))]
    elif result.interrupted_by is not None:
        lines = [f"allstep: {_interrupt(result.interrupted_by)}", *_indented([*_unended(result), *_kept(result)])]
    else:
        left = [end.rank for end in result.ranks if end.left_processes]
        lines = [f"allstep: processes that {_named(left)} left running were ended"] if left else []
    return "\n".join(lines)


def _tail(result: LaunchResult, first: RankEnd) -> list[str]:
    if not result.tail:
        return []
    return [f"allstep: last output of rank {first.rank}:", *(f"  | {line}" for line in result.tail), ""]


def _headline(result: LaunchResult, first: RankEnd) -> list[str]:
    count = len(result.ranks)
    head, *more = _cut([line for line in _cause(first).splitlines() if set(line) - set(" ~^")] or [""])
    failed = f"rank {first.rank} of {count} failed{' first' if count > 1 else ''}, on {result.host}"
    return [f"allstep: {failed}: {head}", *(f"      {line}" for line in more)]


def _cause(end: RankEnd) -> str:
    if end.record is not None:
        return f"{end.record.error}: {end.record.message}" if end.record.message else end.record.error
    if end.exit_code == _INTERRUPTED:
        return f"exit code {end.exit_code}, interrupted by SIGINT"
    return _ending(end) + (", without an exception" if (end.exit_code or 0) > 0 else "")


def _details(result: LaunchResult, first: RankEnd, folder: str) -> list[str]:
    lines = []
    for frame in first.record.frames[-MOST_FRAMES:] if first.record else ():
        where = f" in {frame.function}" if frame.function != "<module>" else ""
        lines.append(f"at {_relative(frame.file, folder)}:{frame.line}{where}")
        lines += [f"    {frame.source}"] if frame.source else []
    if first.record is not None:
        lines.append(_ending(first))
    return [*lines, *_others(result), *_unended(result), *_kept(result)]


def _others(result: LaunchResult) -> list[str]:
    """One line for each thing that happened to the other ranks."""
    first = result.first_failure
    assert first is not None
    lines = []
    for kind in (Outcome.FAILED_TOO, Outcome.CONSEQUENCE, Outcome.STOPPED, Outcome.FINISHED):
        ends = [end for end in result.ranks if end.outcome is kind]
        if not ends:
            continue
        who, were = _named(end.rank for end in ends), "was" if len(ends) == 1 else "were"
        if kind is Outcome.STOPPED:
            lines.append(f"{who} {were} stopped because of it")
        elif kind is Outcome.FINISHED:
            lines.append(f"{who} had finished" if _before(ends, first) else f"{who} finished")
        elif kind is Outcome.FAILED_TOO and all(_cause(end) == _cause(first) for end in ends):
            lines.append(f"{who} failed too, with the same error")
        else:
            lines.append(f"{who} {kind.value}: {_shortened(_cause(ends[0]))}")
    return lines


def _before(ends: Sequence[RankEnd], first: RankEnd) -> bool:
    return all((end.ended_at or 0.0) <= (first.ended_at or 0.0) for end in ends)


def _unended(result: LaunchResult) -> list[str]:
    stuck = [end.rank for end in result.ranks if end.exit_code is None]
    return [f"{_named(stuck)} could not be ended, even by SIGKILL: it waits inside the kernel"] if stuck else []


def _kept(result: LaunchResult) -> list[str]:
    return [f"output kept: {path}" for path in result.logs[:MOST_FRAMES]] + (
        [f"... and {len(result.logs) - MOST_FRAMES} more beside them"] if len(result.logs) > MOST_FRAMES else []
    )


def _interrupt(number: int) -> str:
    return "stopped by Ctrl-C" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


def _ending(end: RankEnd) -> str:
    if end.hung:
        return "did not end by itself after that, and was killed"
    if end.exit_code is None or end.exit_code >= 0:
        return f"exit code {end.exit_code}"
    number = -end.exit_code
    try:
        known = signal.Signals(number)
    except ValueError:  # real-time signals have no names
        return f"killed by signal {number}"
    return f"killed by signal {number} ({known.name})" + (f": {_HINTS[known]}" if known in _HINTS else "")


def _exit_status(first: RankState) -> int:
    code = first.exit_code
    if code is None or -code in first.received:  # its exception is the failure; it hung on its way out
        return 1
    return 128 - code if code < 0 else code or 1


def _named(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0 and 2", "ranks 0-3 and 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    *most, last = parts
    return f"rank{'' if single else 's'} " + (f"{', '.join(most)} and {last}" if most else last)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _cut(lines: Sequence[str]) -> list[str]:
    if len(lines) <= MOST_LINES + 1:
        return list(lines)
    half = MOST_LINES // 2
    return [*lines[:half], f"[... {len(lines) - 2 * half} lines ...]", *lines[-half:]]


def _shortened(text: str, most: int = 300) -> str:
    line = _SOURCE_PLACE.sub("", text.strip().splitlines()[0] if text.strip() else "")
    return line if len(line) <= most else line[: most - 3] + "..."


def _relative(path: str, folder: str) -> str:
    return os.path.relpath(path, folder) if folder and path.startswith(folder.rstrip(os.sep) + os.sep) else path
