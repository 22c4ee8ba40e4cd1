"""Who waits for whom, and why: told while it lasts, and in the error when it ends.

`place` is where this rank is, kept up to date by everything that runs; `board` is where ranks leave word of it; `story` makes
one story of all their words; `watch` is the thread that posts, reads and speaks.
"""

from allstep.comm.watchdog.place import HERE
from allstep.comm.watchdog.watch import quiet_watchdog, start_watchdog, stop_watchdog, told

__all__ = ["HERE", "quiet_watchdog", "start_watchdog", "stop_watchdog", "told"]
