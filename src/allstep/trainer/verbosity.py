"""How much the libraries that a run uses say through Python's `logging`."""

import logging
import sys

from allstep.arguments import TrainingArguments

__all__ = ["set_log_levels"]

_LOGGERS = ("allstep", "transformers", "datasets", "accelerate", "peft")
"""Names under which they speak; those of the user's own script are left alone."""


def set_log_levels(args: TrainingArguments, *, is_main: bool) -> None:
    """Set the levels that `log_level` and `log_level_replica` name; "passive" leaves them as they are.

    Args:
        args: the arguments of the run.
        is_main: whether this process speaks for its job, or host (`log_on_each_node`).
    """
    if (args.log_level if is_main else args.log_level_replica) == "passive":
        return
    level = args.get_process_log_level()
    for name in _LOGGERS:
        if name == "allstep" or name in sys.modules:
            logging.getLogger(name).setLevel(level)
