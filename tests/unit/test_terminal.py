"""What a person sees, in a terminal and without one."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

from allstep.report.record import StepRecord
from allstep.report.terminal import LineSink, ProgressSink

PROGRAM = """
import sys
from allstep.report.record import StepRecord
from allstep.report.sinks import make_sinks

sinks = make_sinks(sys.argv[1])
sinks.message("training 4.2 M parameters on 2 ranks")
sinks.open(60, int(sys.argv[2]))
for step in range(int(sys.argv[2]) + 1, 61):
    sinks.step(
        StepRecord(step=step, epoch=step / 30, loss=5 - step / 20, weight=16, learning_rate=5e-5, samples=16, seconds=0.02)
    )
    if step % 20 == 0:
        sinks.log({"loss": 5 - step / 20, "grad_norm": 1.5, "learning_rate": 5e-5}, step, step / 30)
    if step == 30:
        sinks.log({"eval_loss": 3.6, "eval_runtime": 1.25, "eval_samples_per_second": 312.4}, step, step / 30)
        sinks.message("saved checkpoint-30")
sinks.close()
print("the end", flush=True)
"""


def in_terminal(columns: int, *arguments: str) -> str:
    """All that the program writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not chunk:
                break
            written += chunk
        os.close(ours)
        assert process.wait(60) == 0, written.decode()
    return written.decode()


def screen(text: str, columns: int) -> list[str]:
    """What is left on the screen: a terminal that knows carriage return, line feed, wrapping and cursor up."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|.|\r|\n", text):
        if token.startswith("\x1b"):
            assert token == "\x1b[A", token
            row -= 1
        elif token == "\r":
            column = 0
        elif token == "\n":
            row += 1
        else:
            if column == columns:
                row, column = row + 1, 0
            while len(lines) <= row:
                lines.append([])
            lines[row] += [" "] * (column + 1 - len(lines[row]))
            lines[row][column] = token
            column += 1
    return ["".join(line).rstrip() for line in lines]


@pytest.mark.parametrize("columns", [80, 120])
def test_in_a_terminal_the_bar_stays_one_line_and_messages_stand_above_it(columns: int, tmp_path: object) -> None:
    seen = screen(in_terminal(columns, str(tmp_path), "0"), columns)
    assert seen[:3] == [
        "training 4.2 M parameters on 2 ranks",
        "step 30/60  epoch 1.00  eval_loss 3.600  in 1.2 s  312 samples/s",
        "saved checkpoint-30",
    ]
    assert re.fullmatch(r"100%\|█+\| 60/60 \[\d\d:\d\d<00:00, loss 2, lr 5e-05, 800 samples/s\]", seen[3]), seen[3]
    assert len(seen[3]) <= columns
    assert seen[4:] == ["the end"]


def test_in_a_narrow_terminal_the_bar_is_cut_and_not_wrapped(tmp_path: object) -> None:
    seen = screen(in_terminal(40, str(tmp_path), "0"), 40)
    assert seen[-1] == "the end"
    assert seen[-2].startswith("100%")
    assert len([line for line in seen if "%|" in line]) == 1


def test_a_resumed_bar_begins_where_the_run_stood(tmp_path: object) -> None:
    text = in_terminal(80, str(tmp_path), "15")
    assert " 25%|" in text
    assert "  0%|" not in text


def test_without_a_terminal_each_event_is_a_line_and_nothing_is_rewritten(tmp_path: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "0"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "training 4.2 M parameters on 2 ranks",
        "step 20/60  epoch 0.67  loss 4  grad norm 1.500  lr 5e-05  800 samples/s  0:00:00 left",
        "step 30/60  epoch 1.00  eval_loss 3.600  in 1.2 s  312 samples/s",
        "saved checkpoint-30",
        "step 40/60  epoch 1.33  loss 3  grad norm 1.500  lr 5e-05  800 samples/s  0:00:00 left",
        "step 60/60  epoch 2.00  loss 2  grad norm 1.500  lr 5e-05  800 samples/s",
        "the end",
    ]


def record(step: int, seconds: float = 2.0, samples: int = 16) -> StepRecord:
    return StepRecord(step=step, epoch=0.1, loss=3.5, weight=16, learning_rate=0.01, samples=samples, seconds=seconds)


def test_a_line_tells_the_time_that_is_left_at_the_pace_of_late() -> None:
    stream = io.StringIO()
    sink = LineSink(stream)
    sink.open(100, 40)
    sink.step(record(41, seconds=50.0))
    for step in range(42, 63):
        sink.step(record(step))
    sink.log({"loss": 3.5}, 62, 0.62)
    assert stream.getvalue() == "step  62/100  epoch 0.62  loss 3.500  8.0 samples/s  0:01:16 left\n"


def test_a_record_may_stand_for_several_steps() -> None:
    stream = io.StringIO()
    sink = LineSink(stream)
    sink.open(100, 0)
    for step in (10, 20, 30):
        sink.step(record(step, seconds=10.0, samples=160))
    sink.log({"loss": 3.5}, 30, 0.3)
    assert stream.getvalue().endswith("16.0 samples/s  0:01:10 left\n")


@pytest.mark.parametrize("kind", [LineSink, ProgressSink])
def test_outside_of_training_lines_are_shown_all_the_same(kind: type[LineSink] | type[ProgressSink]) -> None:
    stream = io.StringIO()
    sink = kind(stream)
    sink.log({"eval_loss": 3.5, "epoch": 1.0, "eval_accuracy": 0.75, "note": "x"}, 0, 1.0)
    sink.message("done")
    sink.close()
    assert stream.getvalue() == "step 0  epoch 1.00  eval_loss 3.500  eval_accuracy 0.7500  note x\ndone\n"


def test_a_bar_without_a_known_end_counts_steps() -> None:
    stream = io.StringIO()
    sink = ProgressSink(stream)
    sink.open(None, 0)
    for step in range(1, 8):
        sink.step(record(step))
    sink.log({"loss": 3.5}, 7, 0.7)
    sink.close()
    assert "7 steps [" in stream.getvalue().split("\r")[-1]
    assert "loss 3.500, lr 0.01000, 8.0 samples/s" in stream.getvalue().split("\r")[-1]


def test_a_bar_leaves_no_thread_and_may_be_opened_again() -> None:
    before = set(threading.enumerate())
    sink = ProgressSink(io.StringIO())
    for _ in range(2):
        sink.open(10, 0)
        sink.step(record(1))
        assert set(threading.enumerate()) == before
        sink.close()
    sink.close()


def test_a_line_has_what_is_worth_reading_and_in_short() -> None:
    stream = io.StringIO()
    sink = LineSink(stream)
    sink.open(100, 0)
    sink.step(record(10, seconds=10.0, samples=160))
    logs = {
        "loss": 3.5,
        "grad_norm": 1.5,
        "learning_rate": 5e-5,
        "epoch": 0.1,
        "samples_per_second": 24.3,
        "tokens_per_second": 12345.6,
        "data_share": 0.0999,
        "communication_share": 0.124,
        "model_flops_utilization": 0.413,
        "device_memory_peak_gb": 12.345,
        "host_memory_peak_gb": 2.5,
        "num_input_tokens_seen": 5,
    }
    sink.log(logs, 10, 0.1)
    assert stream.getvalue() == (
        "step  10/100  epoch 0.10  loss 3.500  grad norm 1.500  lr 5e-05  24.3 samples/s  12,346 tokens/s  "
        "rank wait 12%  41% of peak  peak 12.3 GB  0:01:30 left\n"
    )
