"""Ranks that share memory and die, leave, differ, come late, or cannot share it: every rank ends in time and reads why."""

import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from allstep import DistributedDataParallel
from allstep.errors import CollectiveError
from allstep.testing.ranks import RankPool, run_ranks

SIZES = {"small": 100, "large": 3_000_000}
OTHERS = (("small", False), ("small", True), ("large", True))


def shared_group(timeout: float = 60.0, ranks: list[int] | None = None) -> Any:
    group = dist.new_group(ranks, backend="shm", timeout=timedelta(seconds=timeout))
    assert group.peers is not None, group.refusal
    return group


def message_of(group: Any, tensor: torch.Tensor) -> str:
    try:
        dist.all_reduce(tensor, group=group)
    except CollectiveError as error:
        return str(error)
    return "no error"


# ---- a rank dies


def die_in_sum(rank: int, size: int, numel: int, own: bool) -> str:
    group = shared_group()
    tensor = group.allocate_tensor(numel, dtype=torch.float32) if own else torch.ones(numel)
    dist.all_reduce(tensor, group=group)
    if rank == 1:
        group.peers.done = lambda number: os.kill(os.getpid(), signal.SIGKILL)  # in the middle of the next one
        group.peers.watch.wait = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        if numel == SIZES["small"]:
            os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    message = message_of(group, tensor)
    assert time.monotonic() - began < 5, "the others hung for too long"
    return message


@pytest.mark.parametrize(("size", "own"), [("large", False), *(pytest.param(*each, marks=pytest.mark.long) for each in OTHERS)])
def test_a_rank_killed_inside_a_sum_is_named_by_all_others_within_five_seconds(size: str, own: bool) -> None:
    with RankPool(3) as pool:
        outcomes = pool.outcomes(die_in_sum, SIZES[size], own, timeout=20)
    assert outcomes[1].error == "Died"
    assert "-9" in outcomes[1].message
    for rank in (0, 2):
        assert (
            f"Rank {rank} of 3: all_reduce (SUM) with {SIZES[size]} x float32 broke off: rank 1 (process "
            in outcomes[rank].value
        )
        assert "has ended without leaving the group" in outcomes[rank].value


def leave_early(rank: int, size: int) -> str:
    group = shared_group()
    dist.all_reduce(torch.ones(5), group=group)
    if rank == 1:
        dist.destroy_process_group(group)
        return "left"
    return message_of(group, torch.ones(5))


def test_a_rank_that_left_is_named() -> None:
    with RankPool(2) as pool:
        assert pool.run(leave_early)[0] == (
            "Rank 0 of 2: all_reduce (SUM) with 5 x float32 broke off: rank 1 has left the group. All ranks must run the same "
            "collectives before they leave."
        )


def come_late(rank: int, size: int) -> str:
    group = shared_group(timeout=1.0)
    if rank == 1:
        dist.barrier()  # of another group: it never comes to the sum
        return "late"
    message = message_of(group, torch.ones(5))
    dist.barrier()
    return message


def test_a_rank_that_does_not_come_is_named_when_the_timeout_runs_out() -> None:
    message = run_ranks(come_late, 2)[0]
    assert "rank 1 did not come to it within the timeout of 1 s. It lives (process " in message


# ---- ranks differ


def differ(rank: int, size: int) -> list[Any]:
    group = shared_group()
    messages = [
        message_of(group, torch.ones(10 + rank)),
        message_of(group, torch.ones(200_000 + rank)),
        message_of(group, torch.ones(10, dtype=torch.float32 if rank else torch.float64)),
    ]
    own = group.allocate_tensor(200_000, dtype=torch.float32)
    messages.append(message_of(group, own[: 100_000 + rank]))
    try:
        dist.barrier(group=group) if rank else dist.all_reduce(torch.ones(3), group=group)
    except CollectiveError as error:
        messages.append(str(error))
    try:
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 3] if rank else [2, 2], [2, 2], group=group)
    except CollectiveError as error:
        messages.append(str(error))
    after = torch.ones(10)
    dist.all_reduce(after, group=group)
    return [*messages, after[0].item()]


def test_ranks_that_run_different_collectives_all_read_what_each_runs_and_can_go_on(ranks: RankPool) -> None:
    for rank, (small, large, dtypes, own, kinds, *rest) in enumerate(ranks.run(differ)):
        assert f"Rank {rank} of 2: the ranks do not run the same collective" in small
        assert "rank 0: all_reduce (SUM) with 10 x float32; rank 1: all_reduce (SUM) with 11 x float32." in small
        assert "rank 0: all_reduce (SUM) with 200000 x float32; rank 1: all_reduce (SUM) with 200001 x float32." in large
        assert "rank 0: all_reduce (SUM) with 10 x float64; rank 1: all_reduce (SUM) with 10 x float32." in dtypes
        assert "with 100000 x float32; rank 1: all_reduce (SUM) with 100001 x float32." in own
        assert "rank 0: all_reduce (SUM) with 3 x float32; rank 1: barrier." in kinds
        assert rest[-1] == 2.0
        if rank == 1:
            assert "rank 0 sends 8 bytes to rank 1" in rest[0]


# ---- no memory, no sharing


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def short_of_memory(rank: int, size: int) -> list[Any]:
    handler = Lines()
    logging.getLogger("allstep").addHandler(handler)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    limited = (8 << 20 if rank == 0 else 1 << 20, unlimited[1])
    try:
        group = shared_group()
        resource.setrlimit(resource.RLIMIT_FSIZE, limited)
        tensor = group.allocate_tensor(25 << 20, dtype=torch.uint8).fill_(rank + 1)
        without = dist.new_group(backend="shm")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        logging.getLogger("allstep").removeHandler(handler)
    for each in (group, without):
        dist.all_reduce(tensor[:1000], group=each)
    values = [group.peers.locate(tensor) >= 0, without.peers is None, tensor[0].item(), handler.lines]
    dist.destroy_process_group(without)
    dist.destroy_process_group(group)
    return values


def test_where_there_is_no_memory_to_share_gloo_carries_it_and_that_is_said(ranks: RankPool) -> None:
    for rank, (is_shared, is_gloo, value, lines) in enumerate(ranks.run(short_of_memory)):
        assert (is_shared, is_gloo, value) == (False, True, 6)
        assert f"shm: rank {rank} gets ordinary memory, which costs copies: 25.0 MiB of shared memory:" in lines[0]
        if rank == 0:
            assert "shm: the 2 ranks of this group cannot share memory, so gloo carries it: rank 1: 3" in lines[1]
        assert len(lines) == 2 - rank


PROGRAM = """
import os, sys, torch, torch.distributed as dist
import allstep.comm.shm
dist.init_process_group("shm")
group = dist.group.WORLD
x = torch.full((300_000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
own = group.allocate_tensor(5_000_000, dtype=torch.float32).fill_(1.0)
dist.all_reduce(own)
print(group.peers is not None, x[0].item(), own[-1].item(), os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize)
del group  # a gloo group that a global name holds until the interpreter ends aborts it now and then, as with torch alone
dist.destroy_process_group()
"""


def start(count: int, prefix: list[list[str]], folder: Path) -> list[tuple[int, str, str]]:
    """Run PROGRAM on `count` ranks, each behind its own prefix: exit code, output and errors of each."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = folder / "program.py"
    script.write_text(PROGRAM)
    common = dict(
        os.environ, WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), GLOO_SOCKET_IFNAME="lo"
    )
    common.update(TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1")
    running = [
        subprocess.Popen(
            [*prefix[rank % len(prefix)], sys.executable, str(script)],
            env=dict(common, RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        texts = [process.communicate(timeout=90) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [(process.returncode, *text) for process, text in zip(running, texts, strict=True)]


def can_unshare(*flags: str) -> bool:
    try:
        return subprocess.run(["unshare", *flags, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_ranks_in_different_namespaces_never_share_memory(tmp_path: Path) -> None:
    if not can_unshare("--ipc"):
        pytest.skip("this user may not make namespaces")
    ended = start(2, [[], ["unshare", "--ipc"]], tmp_path)
    for code, text, errors in ended:
        assert code == 0, errors
        assert text.startswith("False 3.0 2.0")
    assert "cannot share memory, so gloo carries it: they are on 2 hosts, or in containers of their own" in ended[0][2]
    assert "cannot share memory" not in ended[1][2]


def test_no_room_in_dev_shm_is_needed(tmp_path: Path) -> None:
    tiny = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
    if not can_unshare("--mount"):
        pytest.skip("this user may not make namespaces")
    for code, text, errors in start(2, [tiny], tmp_path):
        assert code == 0, errors
        assert text.split() == ["True", "3.0", "2.0", str(1 << 20)]


@pytest.mark.long
def test_eight_ranks_and_two_jobs_at_once_share_what_cores_there_are(tmp_path: Path) -> None:
    with RankPool(2) as other:
        assert other.run(one_sum) == [3.0, 3.0]
        for code, text, errors in start(8, [[]], tmp_path):
            assert code == 0, errors
            assert text.startswith("True 36.0 8.0")
        assert other.run(one_sum) == [3.0, 3.0]


def one_sum(rank: int, size: int) -> float:
    group = shared_group()
    tensor = torch.full((100_000,), rank + 1.0)
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    return tensor[0].item()


# ---- nothing is left


def held() -> list[int]:
    """Descriptors and mappings of shared memory, descriptors of processes, threads, and all descriptors."""
    gc.collect()
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # that of the listing itself
            continue
    maps = Path("/proc/self/maps").read_text()
    return [
        sum("memfd:allstep" in name for name in names),
        maps.count("memfd:allstep"),
        sum("pidfd" in name for name in names),
        len(os.listdir("/proc/self/task")),
        len(names),
    ]


def join_and_leave(rank: int, size: int, times: int) -> tuple[list[int], list[int]]:
    def once() -> None:
        group = shared_group()
        own = group.allocate_tensor(10_000, dtype=torch.float32).fill_(1.0)
        dist.all_reduce(own, group=group)
        group.open_channel()
        dist.destroy_process_group(group)

    once()
    before = held()
    for _ in range(times):
        once()
    return before, held()


def test_fifty_joins_and_leaves_leave_no_memory_descriptor_or_thread(ranks: RankPool) -> None:
    for before, after in ranks.run(join_and_leave, 50, timeout=120):
        assert after[:3] == before[:3]
        assert after[3] <= before[3]
        assert after[4] <= before[4]


def memory_is_given_back(rank: int, size: int) -> list[int]:
    group = shared_group()
    counts = [held()[1]]
    for _ in range(100):  # more than the table of segments holds
        own = group.allocate_tensor(100_000, dtype=torch.float32).fill_(1.0)
        dist.all_reduce(own, group=group)
        del own
    gc.collect()
    counts.append(held()[1])
    kept = group.allocate_tensor(10, dtype=torch.float32).fill_(7.0)
    dist.destroy_process_group(group)
    return [*counts, int(kept[0])]


def test_memory_goes_back_when_its_last_tensor_does_and_not_before(ranks: RankPool) -> None:
    for before, after, kept in ranks.run(memory_is_given_back):
        assert after <= before + 2  # of the last one, which nothing has come in place of
        assert kept == 7


def many_segments(rank: int, size: int) -> list[bool]:
    group = shared_group()
    tensors = [group.allocate_tensor(100, dtype=torch.float32).fill_(float(i)) for i in range(70)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    results = [tensor[0].item() == 2.0 * i for i, tensor in enumerate(tensors)]
    dist.destroy_process_group(group)
    return results


def test_more_segments_than_the_table_holds_are_ordinary_memory(ranks: RankPool) -> None:
    for results in ranks.run(many_segments):
        assert all(results)


def train_without_shared_memory_here(rank: int, size: int, weighs: bool) -> tuple[bool, list[torch.Tensor]]:
    group = shared_group()
    group.open_channel()
    if rank == 1:
        group.opened_channel.peers.allocate = lambda *_: None
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(40, 2000), torch.nn.Linear(2000, 3)), process_group=group
    )
    gradients = []
    for step in range(2):
        model.zero_grad()
        inputs = torch.full((2 + rank, 40), 1.0 + step + rank)
        loss = model(inputs).square().mean()
        if weighs:
            model.weigh(2.0 + rank)
            loss = loss * (2 + rank)
        loss.backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
    is_shared = group.opened_channel.peers.locate(model._reducer.buckets.gradients.storage.buckets[0]) >= 0
    return is_shared, gradients


@pytest.mark.parametrize("weighs", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_rank_that_got_ordinary_memory_reduces_with_those_that_share(weighs: bool) -> None:
    expected: list[torch.Tensor] = []
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 2000), torch.nn.Linear(2000, 3))
    for step in range(2):
        model.zero_grad()
        for rank in range(2):
            share = (2 + rank) / 5 if weighs else 0.5
            (model(torch.full((2 + rank, 40), 1.0 + step + rank)).square().mean() * share).backward()
        expected += [parameter.grad.clone() for parameter in model.parameters()]
    with RankPool(2) as pool:
        (first, ours), (second, theirs) = pool.run(train_without_shared_memory_here, weighs)
    assert (first, second) == (True, False)
    for mine, other, right in zip(ours, theirs, expected, strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
