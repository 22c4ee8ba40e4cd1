from pathlib import Path

from allstep.trainer.save_record import SaveRecord


def test_a_run_whose_checkpoints_all_came_in_says_nothing() -> None:
    record = SaveRecord()
    assert record.last_words() is None
    record.came_in(Path("out/checkpoint-2"))
    assert record.last_words() is None


def test_those_that_failed_are_counted_and_named_with_the_last_reason() -> None:
    record = SaveRecord()
    record.came_in(Path("out/checkpoint-2"))
    record.refused("checkpoint-4", OSError("a quota"))
    record.refused("checkpoint-6", OSError("a full disk"))
    record.came_in(Path("out/checkpoint-8"))
    assert record.last_words() == (
        "2 of 4 checkpoints could not be written: checkpoint-4, checkpoint-6. The last of them: a full disk"
    )


def test_of_hundreds_the_last_are_named() -> None:
    record = SaveRecord()
    for step in range(1, 301):
        record.refused(f"checkpoint-{step}", OSError("a full disk"))
    words = record.last_words()
    assert words is not None
    assert words.startswith(
        "300 of 300 checkpoints could not be written: 295 more and checkpoint-296, checkpoint-297, checkpoint-298, "
        "checkpoint-299, checkpoint-300. The last of them: a full disk"
    )


def test_where_the_last_one_failed_the_newest_on_disk_is_named_loudly() -> None:
    record = SaveRecord()
    record.refused("checkpoint-2", OSError("a full disk"))
    assert "\nNO CHECKPOINT IS ON DISK: " in str(record.last_words())
    record.resumed_from(Path("out/checkpoint-1"))
    assert "\nNOTHING NEWER THAN out/checkpoint-1 IS ON DISK: " in str(record.last_words())
    record.came_in(Path("out/checkpoint-4"))
    assert "ON DISK" not in str(record.last_words())
