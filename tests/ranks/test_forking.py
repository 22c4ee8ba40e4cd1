"""Loader workers are forked while gloo's threads rest."""

import os
import time

import torch.distributed as dist

from allstep.comm.forking import _states_of_gloo_threads, wait_for_quiet_threads


def forks(rank, size):
    """Many forks, each right after a collective; a child that hangs is found by its deadline."""
    import torch._dynamo  # leaves objects in thread-local state, which gloo's threads then have to let go of

    tensor = torch.ones(1000)
    for _ in range(40):
        dist.all_reduce(tensor)
        wait_for_quiet_threads()
        child = os.fork()
        if child == 0:
            os._exit(0)
        deadline = time.monotonic() + 20
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            assert time.monotonic() < deadline, "a child hangs in its fork"
            time.sleep(0.001)
    return _states_of_gloo_threads()


def test_children_come_out_of_their_fork(ranks):
    for states in ranks.run(forks):
        assert len(states) >= 1
