"""Words that several parts say alike."""

from collections.abc import Iterable

__all__ = ["ranks_in_words"]


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Ranks as a person says them: "rank 3", "ranks 0 and 2", "ranks 0-3 and 7"; at least one."""
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
