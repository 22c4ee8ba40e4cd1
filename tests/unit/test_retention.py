from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from allstep.checkpoint.holds import Hold
from allstep.checkpoint.retention import steps_to_remove, thin_out
from allstep.checkpoint.store import CheckpointStore


@given(
    st.sets(st.integers(1, 50)),
    st.integers(1, 50),
    st.one_of(st.none(), st.integers(-1, 6)),
    st.sets(st.integers(1, 50), max_size=1),
)
def test_retention_keeps_what_it_must(there: set[int], current: int, limit: int | None, best: set[int]) -> None:
    there = there | {current}
    removed = steps_to_remove(there, current, limit, best)
    left = there - set(removed)
    assert set(removed) <= there
    assert {current} | (best & there) | {step for step in there if step > current} <= left
    if limit is None or limit <= 0:
        assert not removed
        return
    past = {step for step in left if step <= current}
    assert len(past) <= max(limit, len({current} | (best & past)))
    assert not removed or len(past) >= limit, "no more is deleted than has to be"
    assert all(step > old for old in removed for step in past - best), "the oldest go first"


def folders(output_dir: Path, *steps: int) -> None:
    for step in steps:
        (output_dir / f"checkpoint-{step}").mkdir()


def left(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.iterdir())


def test_one_that_is_read_stays_until_the_next_save_and_a_line_says_so(tmp_path: Path) -> None:
    folders(tmp_path, 1, 2, 3)
    lines: list[str] = []
    reading = Hold(tmp_path / "checkpoint-2")
    thin_out(CheckpointStore(tmp_path), 3, 1, None, lines.append)
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert lines == [f"Old checkpoint {tmp_path}/checkpoint-2 is read by another process; it stays until the next save."]
    reading.release()
    folders(tmp_path, 4)
    thin_out(CheckpointStore(tmp_path), 4, 1, None, lines.append)
    assert left(tmp_path) == ["checkpoint-4"]
    assert len(lines) == 1


def test_the_best_of_another_folder_is_none_of_this_one(tmp_path: Path) -> None:
    folders(tmp_path, 1, 2)
    thin_out(CheckpointStore(tmp_path), 2, 1, tmp_path / "elsewhere" / "checkpoint-1", lambda line: None)
    assert left(tmp_path) == ["checkpoint-2"]
