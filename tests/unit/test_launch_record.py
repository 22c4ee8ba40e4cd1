import json
import os
import sys
import textwrap

import pytest

from allstep.errors import RankFailedError
from allstep.launch.record import FailureRecord, user_frames


def caught(code, path, **names):
    """The exception that `code` raises, run as if it stood in the file `path`."""
    path.write_text(textwrap.dedent(code))
    try:
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__", **names})
    except BaseException as error:
        return error, error.__traceback__.tb_next
    raise AssertionError("it did not raise")


def test_a_record_survives_json_and_disk(tmp_path):
    error, trace = caught("def f():\n    raise ValueError('bad \\udcff')\nf()", tmp_path / "train.py")
    record = FailureRecord.of(error, trace, rank=3)
    assert FailureRecord.from_json(record.to_json()) == record
    record.write(str(tmp_path / "record.json"))
    assert FailureRecord.from_json((tmp_path / "record.json").read_text()) == record
    assert sorted(os.listdir(tmp_path)) == ["record.json", "train.py"]


def test_it_tells_who_and_what(tmp_path):
    error, trace = caught("raise ValueError('bad')", tmp_path / "train.py")
    record = FailureRecord.of(error, trace, rank=3)
    assert (record.rank, record.pid, record.host) == (3, os.getpid(), os.uname().nodename)
    assert (record.error, record.message, record.collateral) == ("ValueError", "bad", False)
    assert record.traceback.startswith("Traceback")
    assert record.traceback.endswith("ValueError: bad\n")


def test_frames_are_those_of_the_user_with_their_source(tmp_path):
    code = """
    import json

    def load(text):
        return json.loads(text)

    load("{")
    """
    error, trace = caught(code, tmp_path / "train.py")
    frames = user_frames(error, trace)
    assert [(frame.file, frame.line, frame.function, frame.source) for frame in frames] == [
        (str(tmp_path / "train.py"), 7, "<module>", 'load("{")'),
        (str(tmp_path / "train.py"), 5, "load", "return json.loads(text)"),
    ]


def test_installed_packages_are_not_the_user(tmp_path):
    package = tmp_path / "lib" / "site-packages" / "thing.py"
    package.parent.mkdir(parents=True)
    package.write_text("def fail():\n    raise OSError('no')\n")
    scope = {}
    exec(compile(package.read_text(), str(package), "exec"), scope)
    error, trace = caught("fail()", tmp_path / "train.py", fail=scope["fail"])
    assert [frame.source for frame in user_frames(error, trace)] == ["fail()"]
    assert [frame.function for frame in user_frames(error, trace.tb_next)] == ["fail"]  # better than nothing


def test_a_plain_exit_shows_only_frames_of_the_user(tmp_path):
    error, trace = caught("import sys; sys.exit('no data')", tmp_path / "train.py")
    assert [frame.line for frame in user_frames(error, trace)] == [1]
    import argparse

    with pytest.raises(SystemExit) as exited:
        argparse.ArgumentParser().parse_args(["--nothing-like-this"])
    own = user_frames(exited.value, exited.value.__traceback__.tb_next)
    assert own == ()


def test_a_syntax_error_ends_with_its_line(tmp_path):
    (tmp_path / "train.py").write_text("x = 1\nif x\n")
    with pytest.raises(SyntaxError) as raised:
        compile((tmp_path / "train.py").read_text(), str(tmp_path / "train.py"), "exec")
    record = FailureRecord.of(raised.value, None, rank=0)
    assert record.message == "expected ':'"
    assert [(frame.file, frame.line, frame.source) for frame in record.frames] == [(str(tmp_path / "train.py"), 2, "if x")]


def test_endless_recursion_keeps_a_few_frames(tmp_path):
    error, trace = caught("def f():\n    f()\nf()", tmp_path / "train.py")
    assert 1 < len(FailureRecord.of(error, trace, rank=0).frames) < 50


def test_a_huge_message_keeps_both_ends():
    record = FailureRecord.of(ValueError("begin" + "x" * 1_000_000 + "end"), None, rank=0)
    assert len(record.message) < 30_000
    assert record.message.startswith("begin")
    assert record.message.endswith("end")


def test_an_exception_without_a_text_is_still_recorded():
    class Unprintable(Exception):
        def __str__(self):
            raise KeyError

    record = FailureRecord.of(Unprintable(), None, rank=0)
    assert record.error.endswith("Unprintable")
    assert "KeyError" in record.message


def test_an_exception_can_say_that_its_cause_is_elsewhere():
    assert FailureRecord.of(RankFailedError("rank 0 failed"), None, rank=1).collateral
    assert FailureRecord.of(RankFailedError("rank 0 failed"), None, rank=1).error == "allstep.errors.RankFailedError"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions carry notes from Python 3.11 on")
def test_notes_belong_to_the_message():
    error = ValueError("bad")
    error.add_note("in shard 7")
    record = FailureRecord.of(error, None, rank=0)
    assert record.message == "bad\nin shard 7"
    assert json.loads(record.to_json())["message"] == "bad\nin shard 7"
