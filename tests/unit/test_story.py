"""Who waits for whom, told from what the ranks last said; no process and no clock."""

from allstep.comm.watchdog.story import SILENT_AFTER, Sighting, tell


def waits(rank: int, what: str = "all_reduce of gradients", **more: object) -> Sighting:
    fields = {"phase": "backward", "step": 12, "micro_batch": rank, "waited": 5.0, "process": "alive"}
    return Sighting(rank=rank, waiting=what, **{**fields, **more})


def works(rank: int, phase: str = "data", **more: object) -> Sighting:
    fields = {"step": 12, "micro_batch": rank, "phase_age": 31.0, "process": "alive", "pid": 77, "host": "here"}
    return Sighting(rank=rank, phase=phase, **{**fields, **more})


def test_a_rank_that_works_while_the_others_wait_is_late_and_its_place_is_told():
    story = tell(
        [waits(0), works(1, frames=("train.py:33 in __getitem__",)), waits(2, detail="bucket 1 of 2: a … b"), waits(3)]
    )
    assert story.late == (1,)
    assert str(story).splitlines() == [
        "Rank 1 is late; ranks 0 and 2-3 wait for it:",
        "  rank 1 (process 77 on here) is in data (step 12, micro-batch 1) since 31 s",
        "      at train.py:33 in __getitem__",
        "  ranks 0 and 3: in backward (step 12, micro-batch 0), waiting for 5 s in all_reduce of gradients",
        "  rank 2: in backward (step 12, micro-batch 2), waiting for 5 s in all_reduce of gradients (bucket 1 of 2: a … b)",
    ]


def test_a_stopped_process_is_late_though_its_last_word_was_that_it_waits():
    story = tell([waits(0), waits(1, process="stopped", pid=77)])
    assert story.late == (1,)
    assert "stopped by a signal (SIGSTOP" in story.lines[0]
    assert "kill -CONT 77" in story.lines[0]


def test_a_process_that_has_ended_is_late():
    story = tell([works(0, process="gone", left="has failed: ValueError: no"), waits(1)])
    assert story.late == (0,)
    assert "rank 0 (process 77 on here) has ended: it has failed: ValueError: no; last heard of in data" in story.lines[0]


def test_a_rank_that_has_left_is_told_by_its_reason():
    story = tell([waits(0), works(1, left="has left the job")])
    assert story.lines[0] == "rank 1 (process 77 on here) has left the job"


def test_silence_counts_only_after_some_time():
    assert tell([waits(0), waits(1, silent=SILENT_AFTER - 1)]).late == ()
    story = tell([waits(0), waits(1, silent=SILENT_AFTER, process="")])
    assert story.late == (1,)
    assert "gives no sign of life since 7 s" in story.lines[0]


def test_a_rank_never_heard_of_is_late():
    assert "has not been heard of" in tell([waits(0), Sighting(rank=1, unknown=True)]).lines[0]


def test_different_collectives_are_told_side_by_side():
    story = tell([waits(0, "all_gather of an object", phase="evaluate", frames=("a.py:1 in f",)), waits(1)])
    assert story.late == ()
    assert "different collectives" in story.head
    assert story.lines[0] == "rank 0: in evaluate (after step 12), waiting for 5 s in all_gather of an object"
    assert story.lines[1].startswith("rank 1: in backward (step 12")
    assert "    rank 0 is at a.py:1 in f" in story.lines


def test_the_same_collective_in_training_and_in_evaluation_is_not_the_same():
    assert "different collectives" in tell([waits(0, phase="evaluate"), waits(1)]).head


def test_where_all_wait_for_the_same_nobody_is_late():
    story = tell([waits(0), waits(1)])
    assert story.late == ()
    assert story.head.startswith("All 2 ranks wait for the same collective")


def test_of_many_late_ranks_a_few_are_told_and_the_rest_counted():
    story = tell([waits(0), *(works(rank) for rank in range(1, 9))])
    assert story.late == tuple(range(1, 9))
    assert "... and 4 more that are late" in story.lines
    assert str(story).startswith("Ranks 1-8 are late; rank 0 waits for them:")
