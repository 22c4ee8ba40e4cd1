"""Starts the ranks of a job on this machine, watches over them, and says which failed first. Needs no torch."""
