"""Starts the ranks of a job, watches over them on all its hosts, and says which failed first. Needs no torch."""
