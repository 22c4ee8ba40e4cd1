"""Which checkpoints go when a new one has come."""

from collections.abc import Callable, Collection
from pathlib import Path

from allstep.checkpoint.store import CheckpointStore, step_of

__all__ = ["steps_to_remove", "thin_out"]


def thin_out(store: CheckpointStore, current: int, limit: int | None, best: Path | None, say: Callable[[str], None]) -> None:
    """Delete the oldest checkpoints over `limit`. To be called only after that of step `current` was written and came in whole.

    One that another process reads, and one that cannot be deleted, stays with a line that says so; the next save tries again.
    """
    by_step = {step: path for path in store.checkpoints() if (step := step_of(path)) is not None}
    keep = None if best is None or best.parent.resolve() != store.output_dir.resolve() else step_of(best)
    for step in steps_to_remove(by_step, current, limit, () if keep is None else (keep,)):
        try:
            if not store.remove(by_step[step]):
                say(f"Old checkpoint {by_step[step]} is read by another process; it stays until the next save.")
        except OSError as error:
            say(f"Old checkpoint {by_step[step]} could not be deleted: {error}.")


def steps_to_remove(steps: Collection[int], current: int, limit: int | None, keep: Collection[int]) -> list[int]:
    """Which checkpoints to delete, oldest first, so that `limit` are left of those up to `current`, the one just written.

    `current` and those in `keep` stay, even if that is more than `limit`. Checkpoints of later steps stay too: they belong
    to another run, and the newest good one may be among them.
    """
    if limit is None or limit <= 0:
        return []
    past = sorted(step for step in steps if step <= current)
    surplus = len(past) - limit
    return [step for step in past if step != current and step not in keep][: max(surplus, 0)]
