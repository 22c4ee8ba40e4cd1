"""Loader workers collect no garbage that they were forked with; the process that forks them goes on as it was."""

import gc

import pytest

from allstep.comm.forking import forking_workers
from allstep.data.collate import collate
from allstep.data.grid import evaluation_picks
from allstep.data.loader import LoaderOptions, MicroBatchLoader


class Collector:
    """What the process that fetches a sample has set."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return {"frozen": gc.get_freeze_count(), "enabled": gc.isenabled()}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_freezes_what_it_was_forked_with_and_collects_the_rest(workers):
    loader = MicroBatchLoader(Collector(), 0, LoaderOptions(collator=collate, num_workers=workers))
    (feed,) = loader.feeds(evaluation_picks(2, 2, 0, 1))
    assert feed.inputs["enabled"].all()
    assert bool((feed.inputs["frozen"] > 0).all()) is (workers == 1)
    assert gc.isenabled()


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_of_the_process_that_forks_is_left_as_it_was(was_on):
    if not was_on:
        gc.disable()
    try:
        with pytest.raises(OSError, match="no process"), forking_workers():
            raise OSError("no process" if not gc.isenabled() else "the collector is on")
        assert gc.isenabled() is was_on
    finally:
        gc.enable()
