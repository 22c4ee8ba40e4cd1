import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from allstep.report.record import StepRecord
from allstep.report.sink import Sink
from allstep.report.sinks import JsonlSink, SinkGroup, make_sinks
from allstep.report.terminal import LineSink


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(sink: Sink, first: int, last: int) -> None:
    sink.open(last, first)
    for step in range(first + 1, last + 1):
        sink.log({"loss": float(step)}, step, step / 10)
    sink.close()


def test_each_log_is_a_line_with_step_and_epoch_first(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.open(10, 0)
    sink.log({"loss": 0.1 + 0.2, "learning_rate": 5e-5}, 1, 0.1)
    assert sink.path.read_text() == '{"step": 1, "epoch": 0.1, "loss": 0.30000000000000004, "learning_rate": 5e-05}\n', (
        "in the file at once, before the sink is closed"
    )
    sink.log({"loss": float("nan"), "grad_norm": float("inf")}, 2, 0.2)
    sink.step(StepRecord(step=3, epoch=0.3, loss=1.0, weight=1, learning_rate=0.1, samples=8, seconds=1.0))
    sink.message("nothing")
    sink.close()
    assert lines(sink.path)[1] == {"step": 2, "epoch": 0.2, "loss": "nan", "grad_norm": "inf"}
    assert len(lines(sink.path)) == 2


def test_a_resumed_run_appends_and_drops_what_is_done_again(tmp_path: Path) -> None:
    run(JsonlSink(tmp_path), 0, 5)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # the run was killed in the middle of a line
    run(JsonlSink(tmp_path), 3, 6)
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_run_from_the_beginning_keeps_the_file_before_it(tmp_path: Path) -> None:
    for last in (2, 3, 4):
        run(JsonlSink(tmp_path), 0, last)
    assert len(lines(tmp_path / "metrics.jsonl")) == 4
    assert len(lines(tmp_path / "metrics.previous.jsonl")) == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_an_evaluation_without_training_appends(tmp_path: Path) -> None:
    run(JsonlSink(tmp_path), 0, 2)
    sink = JsonlSink(tmp_path)
    sink.log({"eval_loss": 1.0}, 2, 0.2)
    sink.close()
    assert [line.get("eval_loss") for line in lines(tmp_path / "metrics.jsonl")] == [None, None, 1.0]


def test_nothing_is_made_before_there_is_something_to_keep(tmp_path: Path) -> None:
    group = make_sinks(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    group.log({"eval_loss": 1.0}, 0, 0.0)
    group.close()
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_other_ranks_have_no_sinks_and_take_the_same_calls(tmp_path: Path) -> None:
    group = make_sinks(tmp_path, is_main=False)
    assert group.sinks == []
    run(group, 0, 3)
    group.message("unheard")
    assert list(tmp_path.iterdir()) == []


class Full(Sink):
    """A sink whose disk is full."""

    calls = 0

    def open(self, total_steps: int | None, first_step: int) -> None:
        pass

    def step(self, record: StepRecord) -> None:
        pass

    def log(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        self.calls += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_sink_that_cannot_write_is_dropped_with_one_warning_and_the_others_go_on(tmp_path: Path) -> None:
    full, kept = Full(), JsonlSink(tmp_path)
    group = SinkGroup([full, kept])
    with pytest.warns(UserWarning, match="Full shows nothing from here on: .*No space left on device") as caught:
        run(group, 0, 3)
    assert len(caught) == 1
    assert full.calls == 1
    assert len(lines(kept.path)) == 3


def test_a_reader_that_has_gone_does_not_end_the_run(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        group = SinkGroup([LineSink(stream)])
        os.close(reading)
        with pytest.warns(UserWarning, match="LineSink shows nothing from here on: .*Broken pipe"):
            group.message("anybody there?")
        group.message("no")
        with pytest.raises(BrokenPipeError):
            stream.flush()
        with open(os.devnull, "w") as nobody:  # so that closing the stream has somewhere to put its last line
            os.dup2(nobody.fileno(), writing)


def test_an_evaluation_before_training_stays_in_the_file_of_its_run(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.log({"eval_loss": 3.0}, 0, 0.0)
    sink.open(10, 0)
    sink.log({"loss": 2.0}, 5, 0.5)
    sink.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 5]
    again = JsonlSink(tmp_path)
    again.open(10, 0)  # another run from the beginning
    again.log({"loss": 1.0}, 5, 0.5)
    again.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert len((tmp_path / "metrics.previous.jsonl").read_text().splitlines()) == 2
