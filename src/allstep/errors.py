"""The errors that allstep raises.

    AllstepError
    ├── ArgumentsError            (ValueError)    arguments that cannot hold together; every problem found, in one message
    ├── LaunchVariablesError      (ValueError)    launcher variables that are half set or contradict one another
    ├── BackendError              (ValueError)    a communication backend that this torch or this machine does not have
    ├── DataError                 (ValueError)    a dataset, sampler or collator that cannot feed the run
    ├── ReplicaError              (RuntimeError)  models that should be equal on all ranks and are not
    ├── UnusedParametersError     (RuntimeError)  parameters without a gradient where each was promised one
    ├── NonFiniteGradientsError   (ArithmeticError) gradients that are NaN or infinite
    ├── RankFailedError           (RuntimeError)  another rank failed; this one stops because of it
    ├── CollectiveError           (RuntimeError)  a collective did not come to its end (peer gone, time ran out)
    └── CheckpointError           (RuntimeError)  a checkpoint that cannot be written or read

Each has a second base from the standard library, so that `except ValueError` around user mistakes keeps working. Broken
invariants of allstep itself are `assert`s, not errors of this tree.
"""

__all__ = [
    "AllstepError",
    "ArgumentsError",
    "BackendError",
    "CheckpointError",
    "CollectiveError",
    "DataError",
    "LaunchVariablesError",
    "NonFiniteGradientsError",
    "RankFailedError",
    "ReplicaError",
    "UnusedParametersError",
]


class AllstepError(Exception):
    """Every error that allstep raises on purpose."""

    collateral = False
    """True where the cause lies on another rank: a failure report shows that other rank first."""


class ArgumentsError(AllstepError, ValueError):
    """Arguments that cannot hold together. The message lists every problem found, each with what to write instead."""


class LaunchVariablesError(AllstepError, ValueError):
    """RANK, WORLD_SIZE and their like are half set or contradict one another."""


class BackendError(AllstepError, ValueError):
    """The communication backend asked for is not there. The message lists those that are."""


class DataError(AllstepError, ValueError):
    """The data cannot feed the run: empty, too small for `drop_last`, or of a kind that is not supported."""


class ReplicaError(AllstepError, RuntimeError):
    """Ranks hold different models. The message names the first difference, as seen on both ranks."""


class UnusedParametersError(AllstepError, RuntimeError):
    """Parameters got no gradient in a backward in which each was promised one. Raised before the optimizer moves."""


class NonFiniteGradientsError(AllstepError, ArithmeticError):
    """Gradients are NaN or infinite. Raised before the optimizer moves; names rank, parameter and samples."""


class RankFailedError(AllstepError, RuntimeError):
    """Another rank failed and said so. Its message is part of this one."""

    collateral = True


class CollectiveError(AllstepError, RuntimeError):
    """A collective broke off: a peer is gone, or `ddp_timeout` ran out."""

    collateral = True

    late: "tuple[int, ...] | None" = None
    """The ranks that the others waited for, where the watchdog has told; empty where all waited."""


class CheckpointError(AllstepError, RuntimeError):
    """A checkpoint could not be written, or what is on disk is not whole."""

    by_file_system = False
    """True where a save failed on every rank because a file system refused: a full disk, a quota, a read-only folder."""
