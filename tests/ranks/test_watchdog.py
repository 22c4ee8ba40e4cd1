"""While ranks wait for one another, somebody says who is late and where; when it ends, the error says so on every rank."""

import os
import time
import uuid
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from allstep.comm.communicator import GroupCommunicator
from allstep.comm.process_group import join
from allstep.comm.watchdog import HERE, pace, start_watchdog, stop_watchdog
from allstep.comm.watchdog.watch import Watchdog, _watchdog
from allstep.errors import CollectiveError
from allstep.testing.ranks import RankPool, run_ranks

BACKENDS = ("gloo", "shm")


class Table:
    """Where the ranks of a test meet beside what is watched: keys in the store, under a name of this test's own."""

    def __init__(self, name):
        self.store = dist.PrefixStore(f"test/{name}", dist.distributed_c10d._get_default_store())

    def say(self, key):
        self.store.set(key, "yes")

    def hear(self, key):
        self.store.wait([key])


@contextmanager
def watched(rank, size, name, warn_after=0.5):
    """A watchdog of this test's own on each rank; gives what it said here."""
    said = []
    HERE.forget()
    store = dist.distributed_c10d._get_default_store()
    watchdog = Watchdog(store, rank, size, name=name, warn_after=warn_after, say=said.append, tick=0.2)
    try:
        yield said
    finally:
        watchdog.stop("has left the test")
        HERE.forget()


def until(said, enough):
    deadline = time.monotonic() + 30
    while not enough(said):
        assert time.monotonic() < deadline, said
        time.sleep(0.01)


def late_in_data(rank, size, name):
    table = Table(name)
    with watched(rank, size, name) as said:
        HERE.step = 12
        if rank == 1:
            HERE.enter("data")
            HERE.micro_batch = 7
            table.hear("told")
        else:
            HERE.enter("backward")
            with HERE.wait("all_reduce of gradients", lambda: "bucket 1 of 3: a … b"):
                until(said, bool)
            table.say("told")
    return said


def test_rank_0_says_who_is_late_and_where(ranks):
    said, nothing = ranks.run(late_in_data, uuid.uuid4().hex)
    assert nothing == []
    first = said[0]
    assert "s of waiting. Rank 1 is late; rank 0 waits for it:" in first
    assert "is in data (step 12, micro-batch 7) since" in first
    assert "test_watchdog.py" in first
    assert "in late_in_data" in first
    assert "rank 0: in backward (step 12), waiting for" in first or "rank 0: in backward (step 12" in first
    assert "in all_reduce of gradients (bucket 1 of 3: a … b)" in first


def late_rank_0(rank, size, name):
    table = Table(name)
    with watched(rank, size, name) as said:
        if rank == 0:
            HERE.enter("save")
            until(said, bool)
            table.say("told")
        else:
            with HERE.wait("broadcast of 3 tensors"):
                table.hear("told")
    return said


def test_where_rank_0_is_late_itself_it_says_so(ranks):
    said, nothing = ranks.run(late_rank_0, uuid.uuid4().hex)
    assert nothing == []
    assert "Rank 0 is late; rank 1 waits for it:" in said[0]
    assert "is in save since" in said[0]


def in_evaluation(rank, size, name):
    table = Table(name)
    with watched(rank, size, name) as said:
        HERE.step = 5
        HERE.enter("evaluate" if rank == 0 else "backward")
        with HERE.wait("all_gather of an object" if rank == 0 else "all_reduce of gradients"):
            if rank == 0:
                until(said, bool)
                table.say("told")
            else:
                table.hear("told")
    return said


def test_different_collectives_are_told_as_such(ranks):
    said, _ = ranks.run(in_evaluation, uuid.uuid4().hex)
    assert "The ranks wait for different collectives" in said[0]
    assert "rank 0: in evaluate (after step 5), waiting for" in said[0]
    assert "rank 1: in backward (step 5), waiting for" in said[0]


def on_time(rank, size, name):
    communicator = GroupCommunicator()
    with watched(rank, size, name, warn_after=0.05) as said:
        for _ in range(200):
            communicator.all_gather_object(rank)
    return said


def test_short_waits_are_no_news(ranks):
    for said in ranks.run(on_time, uuid.uuid4().hex):
        assert all("Rank" not in each for each in said)


def broken(rank, size, name):
    """Rank 1 never comes; the group of this test has a timeout of its own."""
    backend = "shm" if dist.get_backend() == "shm" else "gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=1.5))
    communicator, table = GroupCommunicator(group), Table(name)
    HERE.forget()
    start_watchdog(dist.group.WORLD, dist.distributed_c10d._get_default_store(), warn_after=0)
    try:
        if rank == 1:
            HERE.enter("data")
            HERE.step = 3
            table.hear("over")
            return "late"
        try:
            communicator.all_gather_object("x")
        except CollectiveError as error:
            return str(error), error.late
        finally:
            table.say("over")
    finally:
        stop_watchdog()
        HERE.forget()
        dist.destroy_process_group(group)


def test_the_error_at_the_timeout_tells_the_story(backend):
    with RankPool(2, backend=backend) as pool:
        (words, late), _ = pool.run(broken, uuid.uuid4().hex)
    assert late == (1,)
    assert words.startswith("Rank 0 of 2: all_gather")
    assert "Rank 1 is late; rank 0 waits for it:" in words
    assert "is in data (step 3) since" in words


def fork(rank, size, name):
    with watched(rank, size, name):
        HERE.enter("forward")
        pid = os.fork()
        if pid == 0:
            os._exit(0 if HERE.phase == "" else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_process_is_at_no_place():
    assert run_ranks(fork, 1, uuid.uuid4().hex) == [0]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_stops_watching_leaves_a_last_word(ranks, who):
    assert ranks.run(leave, uuid.uuid4().hex, who)[1 - who] == "has left the test"


def leave(rank, size, name, who):
    table = Table(name)
    if rank == who:
        with watched(rank, size, name):
            table.hear("met")
        table.say("left")
        return None
    HERE.forget()
    watchdog = Watchdog(dist.distributed_c10d._get_default_store(), rank, size, name=name, say=lambda text: None)
    table.say("met")
    table.hear("left")
    with HERE.wait("barrier"):
        story = watchdog.story()
        sighted = watchdog.sightings()[who]
    watchdog.stop("done")
    HERE.forget()
    assert story.late == (who,)
    return sighted.left


def slow_data(rank, size, name):
    """Steps of which rank 1 spends most in its data, until rank 0 has said so."""
    communicator = GroupCommunicator()
    pace.SECONDS = 0.5
    with watched(rank, size, name, warn_after=0) as said:
        for HERE.step in range(1, 2000):
            HERE.enter("data")
            if rank == 1:
                time.sleep(0.05)  # the fault itself
            HERE.enter("backward")
            if any(communicator.all_gather_object(bool(said))):
                break
            HERE.enter("")
    return said


def test_a_rank_that_is_slow_in_every_step_is_named_with_the_phase(ranks):
    said, nothing = ranks.run(slow_data, uuid.uuid4().hex)
    assert nothing == []
    assert said[0].startswith("allstep: Rank 1 holds up the others, who wait ")
    assert ": data takes 0.05 s a step there" in said[0] or ": data takes 5" in said[0]


def made_again(rank, size, backend):
    """The default group is destroyed and made again, ranks in another order, where the store has another port."""
    HERE.forget()
    join()
    before = _watchdog()
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    del store
    dist.init_process_group(backend, store=again, rank=size - 1 - rank, world_size=size)
    join()
    after = _watchdog()
    dist.barrier()
    stop_watchdog()
    HERE.forget()
    return before.is_over, after is not before, after._rank == size - 1 - rank


def test_a_group_that_is_made_again_gets_a_watchdog_of_its_own(backend):
    with RankPool(2, backend=backend) as pool:
        assert pool.run(made_again, backend) == [(True, True, True)] * 2
