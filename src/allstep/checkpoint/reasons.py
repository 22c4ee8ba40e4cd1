"""Why something could not be done, in the operating system's own words where it was the one to refuse."""

import os
import re

__all__ = ["reason", "system_error"]

_NUMBER = re.compile(r"\(os error (\d+)\)")
"""How the code behind safetensors, which raises errors of its own kind, says what the system said to it."""


def system_error(error: BaseException) -> OSError | None:
    """The refusal of the operating system behind `error`, such as a full disk; None where there is none."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen
        if number := _NUMBER.search(str(seen)):
            return OSError(int(number.group(1)), os.strerror(int(number.group(1))))
        seen = seen.__cause__ or seen.__context__
    return None


def reason(error: BaseException) -> str:
    """What went wrong, in a line; for instance "No space left on device"."""
    refused = system_error(error)
    if refused is not None:
        return str(refused.strerror)
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0].rstrip('.')}" if text else type(error).__name__
