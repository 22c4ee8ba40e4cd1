"""A channel: a second line between the same ranks, whose collectives never pair with those of the first.

Shared by all who ask for it, renewed with its group, and gone with it: no thread, no open file.
"""

import gc
import os
import subprocess
import sys
import textwrap
from collections import Counter
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from allstep.comm import channels
from allstep.comm.communicator import Communicator, GroupCommunicator, SoloCommunicator, communicator_for
from allstep.comm.forking import _states_of_gloo_threads
from allstep.comm.process_group import leave
from allstep.errors import CollectiveError
from allstep.testing.ranks import RankPool
from allstep.testing.threads import ThreadRank


def total(line: Communicator, value: float, elements: int = 8) -> float:
    x = torch.full((elements,), value)
    line.all_reduce(x).wait()
    assert (x == x[0]).all()
    return float(x[0])


@contextmanager
def new_group(ranks, **arguments):
    group = dist.new_group(ranks, **arguments)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def open_things() -> Counter[str]:
    """The threads of this process and what its file descriptors lead to, by kind."""
    gc.collect()
    threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
        except FileNotFoundError:  # the one that lists them
            continue
    return Counter(files) + Counter({"threads": len(threads)})


# Two lines.


def in_opposite_order(rank, size, first_launched_waits_first):
    base = communicator_for(None)
    channel = base.channel()
    assert channel is not base
    seen = []
    for number in range(100):
        ours, theirs = torch.full((64,), float(number)), torch.full((64,), 1000.0)
        tensors = [(base, ours), (channel, theirs)]
        if (rank + number) % 2:
            tensors.reverse()
        pending = [line.all_reduce(tensor) for line, tensor in tensors]
        for each in pending if first_launched_waits_first else reversed(pending):
            each.wait()
        seen.append((ours.unique().tolist(), theirs.unique().tolist()))
    return seen


@pytest.mark.parametrize("first_launched_waits_first", [True, False])
def test_collectives_of_the_two_lines_may_come_in_another_order_on_each_rank(ranks, first_launched_waits_first):
    for seen in ranks.run(in_opposite_order, first_launched_waits_first):
        assert seen == [([2.0 * number], [2000.0]) for number in range(100)]


def one_waits_before_the_other_starts(rank, size):
    base = communicator_for(None)
    channel = base.channel()
    bucket, statistics = torch.ones(16), torch.full((16,), 5.0)
    if rank == 0:  # the bucket is under way when the statistics are asked for
        pending = channel.all_reduce(bucket)
        base.all_reduce(statistics).wait()
    else:
        base.all_reduce(statistics).wait()
        pending = channel.all_reduce(bucket)
    objects = base.all_gather_object(rank)
    pending.wait()
    return bucket.unique().tolist(), statistics.unique().tolist(), objects


def test_a_rank_may_wait_on_one_line_while_the_other_has_not_begun_on_the_second(ranks):
    assert ranks.run(one_waits_before_the_other_starts) == [([2.0], [10.0], [0, 1])] * 2


def every_collective(rank, size):
    channel = communicator_for(None).channel()
    sent = [torch.full((3,), float(rank)), torch.arange(4) * rank]
    channel.broadcast(sent, source=1)
    channel.barrier()
    return (
        [tensor.tolist() for tensor in sent],
        channel.all_gather_object({"rank": rank}),
        channel.broadcast_object(f"from {rank}"),
    )


def test_a_channel_carries_every_collective(ranks):
    expected = ([[1.0, 1.0, 1.0], [0, 1, 2, 3]], [{"rank": 0}, {"rank": 1}], "from 0")
    assert ranks.run(every_collective) == [expected] * 2


# Who gets one, and which.


def carriers(rank, size):
    first, second, by_name = communicator_for(None), communicator_for(None), communicator_for(dist.group.WORLD)
    groups = dist.get_pg_count()
    lines = [each.channel().carrier for each in (first, second, by_name)]
    with new_group([0, 1]) as subgroup:
        other = communicator_for(subgroup).channel()
        return (
            lines[0] is lines[1] is lines[2],
            lines[0] is not dist.group.WORLD,
            other.carrier not in (lines[0], subgroup),
            dist.get_pg_count() - groups,  # only the group that was made here
            (other.rank, other.size, other.backend),
            other.channel() is other,
        )


def test_all_communicators_of_a_group_share_one_channel_that_torch_does_not_list(ranks):
    for rank, found in enumerate(ranks.run(carriers)):
        assert found == (True, True, True, 1, (rank, 2, "gloo"), True)


def connects_again(rank, size):
    base = communicator_for(None)
    base.channel()
    with mock.patch.object(channels, "_connected", side_effect=AssertionError("made twice")):
        return base.channel() is not base if rank == 0 else True  # the others need not come


def test_a_channel_that_is_there_is_given_out_without_a_collective(ranks):
    assert ranks.run(connects_again) == [True, True]


def without_one(rank, size):
    class OfPython(dist.ProcessGroup):
        pass

    with new_group([rank], use_local_synchronization=True) as alone:
        solo = GroupCommunicator(alone)
        return solo.channel() is solo, channels.can_have_channel(OfPython(rank, size))


def test_where_there_is_nothing_to_pair_with_a_communicator_is_its_own_channel(ranks):
    assert ranks.run(without_one) == [(True, False)] * 2
    for each in (SoloCommunicator(), ThreadRank.alone()):
        assert each.channel() is each


def where_one_rank_cannot(rank, size):
    no_sockets = mock.patch.object(channels, "_connected", side_effect=RuntimeError("no sockets left"))
    with new_group([0, 1], timeout=timedelta(seconds=6)) as group:
        base = GroupCommunicator(group)
        with no_sockets if rank == 1 else nullcontext():
            given = base.channel()
        later = base.channel()
        return given is base, later is base, total(later, 1.0)


def test_where_one_rank_cannot_open_a_channel_no_rank_gets_one(ranks):
    assert ranks.run(where_one_rank_cannot) == [(True, True, 2.0)] * 2


def connected_at_first_use(rank, size):
    with new_group([0, 1]) as group:
        channel = GroupCommunicator(group).channel(at_once=False)
        before = channels.opened_channel(group)
        return before, total(channel, 3.0), channels.opened_channel(group) is channel.carrier


def test_a_channel_may_be_connected_at_its_first_use(ranks):
    assert ranks.run(connected_at_first_use) == [(None, 6.0, True)] * 2


def among_some(rank, size):
    with new_group([1, 3]) as group:
        if rank not in (1, 3):
            return None
        channel = GroupCommunicator(group).channel()
        return channel.rank, channel.size, total(channel, float(rank))


def test_a_channel_joins_the_ranks_of_its_group_only(four_ranks):
    assert four_ranks.run(among_some) == [None, (0, 2, 4.0), None, (1, 2, 4.0)]


# Errors.


def one_does_not_come(rank, size):
    group = dist.new_group([0, 1, 3], timeout=timedelta(seconds=600))
    messages = []
    if rank != 2:
        base = GroupCommunicator(group)
        channel = base.channel()
        assert carrier_timeout(channel) == timedelta(seconds=600)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1.5), group)
        for line in (channel, base) if rank != 3 else ():
            with pytest.raises(CollectiveError) as caught:
                total(line, 1.0)
            messages.append(str(caught.value))
    communicator_for(None).barrier()
    return messages


def carrier_timeout(line):
    return line.carrier._get_backend(torch.device("cpu")).options._timeout


def test_errors_of_a_channel_read_as_those_of_its_group_and_come_as_soon(four_ranks):
    """Also where the group's timeout was set after the channel was made."""
    outcomes = four_ranks.run(one_does_not_come)
    assert outcomes[2:] == [[], []]
    for rank, (on_channel, on_base) in enumerate(outcomes[:2]):
        for message in (on_channel, on_base):
            assert message.startswith(f"Rank {rank} of 3: all_reduce of 8 torch.float32 broke off: ")
            assert "Rank(s) 2 failed, left, or did not come" in message


# Nothing is left.


def groups_come_and_go(rank, size):
    def one_round():
        group = dist.new_group([0, 1])
        channel = GroupCommunicator(group).channel()
        assert total(channel, 1.0) == 2.0
        dist.destroy_process_group(group)
        communicator_for(None).barrier()

    total(communicator_for(None).channel(), 1.0)
    one_round()
    before, cached = open_things(), len(channels._CHANNELS)
    for _ in range(50):
        one_round()
    return open_things() - before, len(channels._CHANNELS) - cached


def test_fifty_groups_with_channels_leave_no_thread_and_no_open_file(ranks):
    assert ranks.run(groups_come_and_go) == [(Counter(), 0)] * 2


def the_world_comes_and_goes(rank, size, file):
    own = dist.FileStore(str(file), size)
    dist.destroy_process_group()
    results, kept = [], None

    def one_round(number):
        nonlocal kept
        # the third round has the very store and names of the second
        store = dist.PrefixStore(str(number), own)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        names.add(dist.group.WORLD.group_name)
        channel = communicator_for(None).channel()
        kept = kept or channel
        results.append((total(channel, 1.0), total(kept, 2.0), kept.carrier is channel.carrier, len(channels._CHANNELS)))

    names: set[str] = set()
    one_round(0)
    leave()
    before = open_things()
    for number in range(1, 50):
        one_round(number)
        if number % 2:
            leave()
        else:
            dist.destroy_process_group()
    left = open_things() - before
    dist.init_process_group("gloo", store=dist.PrefixStore("end", own), rank=rank, world_size=size)  # the pool destroys it
    return results, left, len(names)


def test_a_channel_is_renewed_with_the_default_group_and_gone_with_it(tmp_path):
    with RankPool(2) as pool:
        for results, left, names in pool.run(the_world_comes_and_goes, tmp_path / "store"):
            assert results == [(2.0, 4.0, True, 1)] * 50
            assert left == Counter()
            assert names == 1  # it is the same name that is used again


def over_a_store_with_remains(rank, size, file):
    own = dist.FileStore(str(file), size)
    results = []
    for number in range(5):  # new connections each time; the store stays, with all that channels wrote to it
        store = dist.PrefixStore(str(number), own)
        group = dist.ProcessGroup(dist.PrefixStore("same", own), rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        base = GroupCommunicator(group)
        results.append((total(base.channel(), float(number)), base.channel() is not base))
    return results


def test_what_an_earlier_channel_left_in_the_store_does_no_harm(ranks, tmp_path):
    expected = [(2.0 * number, True) for number in range(5)]
    assert ranks.run(over_a_store_with_remains, tmp_path / "store") == [expected] * 2


def resting_threads(rank, size):
    """How many threads `forking` watches over before and after a channel has joined them."""
    with new_group([0, 1]) as group:
        base = GroupCommunicator(group)
        total(base, 1.0)
        before = len(_states_of_gloo_threads())
        channel = base.channel()
        for _ in range(4):  # each of its threads has a turn
            pending = [channel.all_reduce(torch.ones(1 << 16)) for _ in range(4)]
            for each in pending:
                each.wait()
        return len(_states_of_gloo_threads()) > before


def test_threads_of_a_channel_are_waited_for_before_a_fork(ranks):
    assert ranks.run(resting_threads) == [True, True]


def loaded_by_forks(rank, size):
    channel = communicator_for(None).channel()
    assert total(channel, 1.0) == 2.0
    seen = []
    for number in range(3):
        loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4, num_workers=2, multiprocessing_context="fork")
        pending = channel.all_reduce(torch.ones(4))
        seen.append([batch.tolist() for batch in loader])
        pending.wait()
        assert total(channel, float(number)) == 2.0 * number
    return seen


@pytest.mark.filterwarnings("ignore:This process")
def test_workers_may_be_forked_beside_a_channel(ranks):
    assert ranks.run(loaded_by_forks) == [[[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3] * 2


SCRIPT = textwrap.dedent(
    """
    import os
    import torch
    import torch.distributed as dist
    import allstep
    from allstep.comm.communicator import communicator_for

    {join}
    channel = communicator_for(None).channel()
    x = torch.ones(4)
    channel.all_reduce(x).wait()
    assert x.tolist() == [2.0] * 4
    {end}
    threads = [open(f"/proc/self/task/{{t}}/comm").read().strip() for t in os.listdir("/proc/self/task")]
    print([name for name in threads if "gloo" in name or "tcpstore" in name] if {looks} else [])
    """
)

BY_HAND = 'dist.init_process_group("gloo")'


@pytest.mark.parametrize(
    ("join", "end"),
    [
        ("allstep.join()", ""),
        pytest.param("allstep.join()", "allstep.leave()", marks=pytest.mark.long),
        pytest.param(BY_HAND, "dist.destroy_process_group()", marks=pytest.mark.long),
        pytest.param(BY_HAND, "", marks=pytest.mark.long),
    ],
)
def test_a_program_with_a_channel_ends_cleanly(tmp_path, join, end):
    (tmp_path / "script.py").write_text(SCRIPT.format(join=join, end=end, looks=bool(end)))
    command = [sys.executable, "-m", "allstep", "launch", "--num_processes", "2", "--log_dir", str(tmp_path), "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    for output in (done.stdout, (tmp_path / "rank-1.log").read_text()):
        assert output.strip().splitlines()[-1] == "[]"
