"""Checkpoints: a folder is there whole or not at all. Start reading at `manager`."""
