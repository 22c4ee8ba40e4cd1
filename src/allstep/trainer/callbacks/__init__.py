"""Callbacks: what hangs onto the events of a run."""
