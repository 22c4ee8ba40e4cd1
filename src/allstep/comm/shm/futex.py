"""Sleeping until a number in shared memory changes, by Linux's futex.

Where there are fewer cores than ranks, a rank that polls, or yields, keeps the core from the one that it waits for.
"""

import ctypes

__all__ = ["wait", "wake"]

_FUTEX, _WAIT, _WAKE = 202, 0, 1  # the number of the system call on x86-64; between processes
_ALL = 0x7FFFFFFF


class _Duration(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_call = ctypes.CDLL(None).syscall
_call.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the lower half of the number at `address` is that of `value`, at most so long; may return before."""
    duration = _Duration(int(seconds), int(seconds % 1 * 1e9))
    _call(_FUTEX, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(duration), None, 0)


def wake(address: int) -> None:
    """Wake all who sleep there."""
    _call(_FUTEX, address, _WAKE, _ALL, None, None, 0)
