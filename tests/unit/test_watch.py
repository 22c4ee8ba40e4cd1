"""Bar, lines, both or neither, as callbacks are added and taken out."""

import fcntl
import io
import os
import struct
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from allstep import PrinterCallback, ProgressCallback, Trainer, TrainingArguments
from allstep.report.record import StepRecord
from allstep.report.terminal import LineSink, ProgressSink
from allstep.report.watch import WatchSink
from allstep.testing.models import Regression, RegressionNet

BAR, LINES = "ProgressCallback", "PrinterCallback"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(step: int) -> StepRecord:
    return StepRecord(step=step, epoch=0.1, loss=3.5, weight=16, learning_rate=0.01, samples=16, seconds=2.0)


@pytest.mark.parametrize(
    ("shown", "stderr", "kind"),
    [
        ({BAR}, Terminal(), ProgressSink),
        ({LINES}, Terminal(), LineSink),
        ({BAR, LINES}, Terminal(), ProgressSink),
        ({BAR}, io.StringIO(), LineSink),
        ({BAR}, None, LineSink),
        (set(), Terminal(), LineSink),
    ],
)
def test_a_bar_is_for_terminals_that_want_one(
    shown: set[str], stderr: Any, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    assert type(WatchSink(shown.__contains__).sink) is kind


def watched(shown: set[str], monkeypatch: pytest.MonkeyPatch) -> tuple[WatchSink, Terminal, io.StringIO]:
    err, out = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "stdout", out)
    return WatchSink(shown.__contains__), err, out


def test_with_both_the_lines_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, err, _ = watched({BAR, LINES}, monkeypatch)
    sink.open(10, 0)
    sink.step(record(1))
    sink.log({"loss": 3.5}, 1, 0.1)
    sink.close()
    assert "step  1/10  epoch 0.10  loss 3.500" in err.getvalue()
    assert "| 1/10 [" in err.getvalue()


def test_with_neither_only_messages_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, err, out = watched(set(), monkeypatch)
    sink.open(10, 0)
    sink.step(record(1))
    sink.log({"loss": 3.5, "eval_loss": 2.5}, 1, 0.1)
    sink.message("resumed")
    sink.close()
    assert (err.getvalue(), out.getvalue()) == ("", "resumed\n")


def test_what_is_shown_may_change_in_mid_training(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {BAR}
    sink, err, out = watched(shown, monkeypatch)
    sink.open(10, 0)
    sink.step(record(1))
    shown.clear()
    sink.step(record(2))
    bar = err.getvalue()
    assert "1/10" in bar
    shown.add(LINES)
    sink.step(record(3))
    sink.log({"loss": 3.5}, 3, 0.3)
    assert err.getvalue() == bar
    assert out.getvalue() == "step  3/10  epoch 0.30  loss 3.500  8.0 samples/s  0:00:14 left\n"
    shown.add(BAR)
    sink.step(record(4))
    sink.close()
    assert "| 4/10 [" in err.getvalue()


def test_a_pseudo_terminal_of_no_width_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert type(WatchSink({BAR}.__contains__).sink) is LineSink
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        assert type(WatchSink({BAR}.__contains__).sink) is ProgressSink
    os.close(ours)


@pytest.mark.parametrize(
    ("disable_tqdm", "change", "lines"),
    [
        (None, lambda trainer: None, 2),
        (True, lambda trainer: None, 2),
        (None, lambda trainer: trainer.remove_callback(ProgressCallback), 0),
        (True, lambda trainer: trainer.pop_callback(PrinterCallback), 0),
        (True, lambda trainer: trainer.remove_callback(ProgressCallback), 2),
        (None, lambda trainer: (trainer.remove_callback(ProgressCallback), trainer.add_callback(PrinterCallback)), 2),
    ],
)
def test_callbacks_of_a_trainer_switch_what_it_shows(
    disable_tqdm: bool | None, change: Any, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=2, logging_steps=1, save_strategy="no", disable_tqdm=disable_tqdm)
    trainer = Trainer(RegressionNet(), args, train_dataset=Regression(32))
    change(trainer)
    trainer.train()
    shown = capsys.readouterr().out
    assert len([line for line in shown.splitlines() if "  loss " in line]) == lines
    assert "2 steps" in shown, "what a run amounted to is always said"
