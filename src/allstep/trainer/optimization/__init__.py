"""Optimizers, schedules, the loss scale, and what is done with all gradients of a step."""
