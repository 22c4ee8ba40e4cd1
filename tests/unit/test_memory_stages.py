"""What stages of a run take, in bytes of this process."""

import mmap

import torch

from allstep.report.memory_stages import MemoryStages, host_memory, host_memory_peak

MIB = 2**20
CPU = torch.device("cpu")


def touched(size):
    """Memory of its own, straight from the kernel: what other tests left to the allocator has no part in it."""
    memory = mmap.mmap(-1, size * MIB)
    for page in range(0, size * MIB, mmap.PAGESIZE):
        memory[page] = 1
    return memory


def test_what_stays_and_what_was_needed_for_a_while():
    stages, kept, metrics, inner = MemoryStages(True, CPU), [], {"train_loss": 1.0}, {}
    stages.begin("init")
    kept.append(touched(64))
    stages.end("init")
    stages.begin("train")
    touched(128).close()
    kept.append(touched(64))
    stages.begin("eval")
    stages.end("eval", inner)
    stages.end("train", metrics)
    assert inner == {}
    assert list(metrics) == [
        "train_loss",
        "init_mem_cpu_alloc_delta",
        "init_mem_cpu_peaked_delta",
        "before_init_mem_cpu",
        "train_mem_cpu_alloc_delta",
        "train_mem_cpu_peaked_delta",
    ]
    assert 48 * MIB < metrics["init_mem_cpu_alloc_delta"] < 80 * MIB
    assert 48 * MIB < metrics["train_mem_cpu_alloc_delta"] < 80 * MIB
    assert metrics["train_mem_cpu_peaked_delta"] > 48 * MIB
    stages.begin("eval")
    stages.end("eval", inner)
    assert list(inner) == ["eval_mem_cpu_alloc_delta", "eval_mem_cpu_peaked_delta"], "the first stage has told of init"
    for memory in kept:
        memory.close()


def test_switched_off_it_measures_nothing():
    stages, metrics = MemoryStages(False, CPU), {}
    stages.begin("train")
    stages.end("train", metrics)
    assert metrics == {}


def test_a_stage_that_failed_may_begin_again():
    stages, metrics = MemoryStages(True, CPU), {}
    stages.begin("train")
    stages.begin("train")
    stages.end("train", metrics)
    stages.end("train", metrics)
    assert len(metrics) == 2


def test_a_process_holds_no_more_than_its_peak():
    assert MIB < host_memory() <= host_memory_peak() + MIB
