"""The report that a person reads when a launch did not end well."""

import os
import re
import signal
from collections.abc import Iterable, Sequence

from allstep.launch.job import Machine
from allstep.launch.result import LaunchResult, RankEnd
from allstep.launch.verdict import Outcome
from allstep.words import ranks_in_words

__all__ = ["cause", "machine_named", "report"]

MOST_FRAMES = 4
"""User frames in the report; the traceback above it has all of them."""
MOST_LINES = 14
"""Lines of one message in the report. The first and the last say most: a loader's worker puts its own error at the end."""

_HINTS: dict[int, str] = {
    signal.SIGTERM: "the launcher did not send it",
    signal.SIGSEGV: "a crash in native code; its Python stack is in the output of the rank",
    signal.SIGBUS: "perhaps shared memory (/dev/shm) is full",
    signal.SIGABRT: "native code gave up; its reason is in the output of the rank. torch can end so where a rank leaves "
    "without torch.distributed.destroy_process_group()",
}
_INTERRUPTED = 128 + signal.SIGINT
_SOURCE_PLACE = re.compile(r"\[\S+:\d+\] ")
"""Where in its own C++ source a library raised: noise in a line about a consequence."""


def report(result: LaunchResult, folder: str = "") -> str:
    """What to print at the end of a launch: the story of its failure; empty where all went well.

    Args:
        folder: paths below it are shown relative to it; usually the working folder.
    """
    first = result.first_failure
    if first is not None:
        lines = [*_tail(result, first), *_headline(result, first), *_indented(_details(result, first, folder))]
    elif result.interrupted_by is not None:
        rest = [*_unended(result), *_kept(result)]
        lines = [f"allstep: {_interrupt(result.interrupted_by, result)}", *_indented([*result.earlier, *rest])]
    else:
        left = [end.rank for end in result.ranks if end.left_processes]
        lines = [f"allstep: processes that {ranks_in_words(left)} left running were ended"] if left else []
        if result.earlier:
            lines += ["allstep: the job finished, after these failures:", *_indented(result.earlier)]
    return "\n".join(lines)


def cause(result: LaunchResult) -> str:
    """The first failure in a line: "rank 1 failed first: killed by signal 9 (SIGKILL)"; empty where no rank failed."""
    first = result.first_failure
    if first is None:
        return ""
    if first.record is not None and first.record.late:
        return f"{ranks_in_words(first.record.late)} did not come: {_shortened(_cause(first))}"
    lost = _lost(result, first)
    return lost or f"rank {first.rank} {_failed(result, first)}: {_shortened(_cause(first))}"


def machine_named(machine: int, host: str, ranks: Sequence[int]) -> str:
    """A host and its ranks in words: "machine 1 (node7, ranks 2-3)"."""
    return f"machine {machine} ({host}, {ranks_in_words(ranks)})"


def _tail(result: LaunchResult, first: RankEnd) -> list[str]:
    if not result.tail:
        return []
    return [f"allstep: last output of rank {first.rank}:", *(f"  | {line}" for line in result.tail), ""]


def _headline(result: LaunchResult, first: RankEnd) -> list[str]:
    lost = _lost(result, first)
    if lost:
        return [f"allstep: {lost}"]
    count = len(result.ranks)
    head, *more = _cut([line for line in _cause(first).splitlines() if set(line) - set(" ~^")] or [""])
    host = f"machine {first.machine} ({result.host_of(first)})" if result.machines else result.host
    failed = f"rank {first.rank} of {count} {_failed(result, first)}"
    if first.record is not None and first.record.late:
        late = first.record.late
        failed = f"{ranks_in_words(late)} of {count} did not come, and rank {first.rank} gave up first"
    return [f"allstep: {failed}, on {host}: {head}", *(f"      {line}" for line in more)]


def _failed(result: LaunchResult, first: RankEnd) -> str:
    if _left_early(first):
        return "left early"
    return "failed first" if len(result.ranks) > 1 else "failed"


def _left_early(end: RankEnd) -> bool:
    """Whether the rank, which brought the others down, ended without an error itself."""
    return end.outcome is Outcome.FAILED_FIRST and end.record is None and (end.exit_code == 0 or end.stop is not None)


def _lost(result: LaunchResult, first: RankEnd) -> str:
    """What to say of the host of `first` where that was lost."""
    machine: Machine | None = next((each for each in result.machines if each.machine == first.machine), None)
    if machine is None or machine.lost_at is None or first.exit_code is not None or first.record is not None:
        return ""
    ranks = [end.rank for end in result.ranks if end.machine == first.machine]
    return f"{machine_named(machine.machine, machine.host, ranks)} was lost: {machine.lost_because}"


def _cause(end: RankEnd) -> str:
    if end.record is not None:
        return f"{end.record.error}: {end.record.message}" if end.record.message else end.record.error
    if _left_early(end):
        asked = f", as {_signal_name(end.stop.signal)} had asked it to" if end.stop else ""
        return f"exit code {end.exit_code}{asked}, while others still trained"
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
    return [*lines, *_others(result), *_unended(result), *result.earlier, *_kept(result)]


def _others(result: LaunchResult) -> list[str]:
    """One line for each thing that happened to the other ranks."""
    first = result.first_failure
    assert first is not None
    lines = []
    for kind in (Outcome.FAILED_TOO, Outcome.CONSEQUENCE, Outcome.STOPPED, Outcome.FINISHED, Outcome.LOST):
        ends = [end for end in result.ranks if end.outcome is kind]
        if not ends:
            continue
        who, were = ranks_in_words(end.rank for end in ends), "was" if len(ends) == 1 else "were"
        if kind is Outcome.STOPPED:
            lines.append(f"{who} {were} stopped because of it")
        elif kind is Outcome.LOST:
            rest = [end.rank for end in ends if end.machine != first.machine]
            lines += [f"nothing is known of {ranks_in_words(rest)}{' either' if _lost(result, first) else ''}"] if rest else []
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
    lost = {each.machine for each in result.machines if each.lost_at is not None}
    stuck = [end.rank for end in result.ranks if end.exit_code is None and end.machine not in lost]
    return [f"{ranks_in_words(stuck)} could not be ended, even by SIGKILL: it waits inside the kernel"] if stuck else []


def _kept(result: LaunchResult) -> list[str]:
    return [f"output kept: {path}" for path in result.logs[:MOST_FRAMES]] + (
        [f"... and {len(result.logs) - MOST_FRAMES} more beside them"] if len(result.logs) > MOST_FRAMES else []
    )


def _interrupt(number: int, result: LaunchResult) -> str:
    stopped = "stopped by Ctrl-C" if number == signal.SIGINT else f"stopped by {_signal_name(number)}"
    note = result.stop
    if note is None:
        return stopped
    to = f" (sent to rank {note.rank})" if note.rank is not None and not result.asked_to_stop else ""
    at = f" at step {note.step}" if note.step is not None else ""
    saved = "" if note.step is None else f"; checkpoint: {note.checkpoint or 'none'}"
    return f"{stopped}{to}{at}{saved}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


def _ending(end: RankEnd) -> str:
    if end.hung:
        return "did not end by itself after that, and was killed"
    if end.exit_code is None or end.exit_code >= 0:
        return f"exit code {end.exit_code}"
    number = -end.exit_code
    name = _signal_name(number)
    hint = _memory_hint(end) if number == signal.SIGKILL else _HINTS.get(number, "")
    return f"killed by signal {number}{f' ({name})' if name.startswith('SIG') else ''}{f': {hint}' if hint else ''}"


def _memory_hint(end: RankEnd) -> str:
    if end.oom_kills is None:
        return "perhaps the system ran out of memory; the launcher did not send it"
    if end.oom_kills == 0:
        return "the launcher did not send it, and its control group counts no kill for want of memory"
    count = f"{end.oom_kills} process{'es' if end.oom_kills > 1 else ''}"
    return f"memory ran out: the kernel killed {count} of its control group for it"


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
