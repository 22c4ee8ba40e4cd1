import os
import stat

import pytest

from allstep.errors import ArgumentsError
from allstep.launch.logs import RankFiles


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Temporary files go here."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def written(files, rank, text):
    descriptor = files.open_log(rank)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def test_nobody_else_can_read_the_files(temporary):
    files = RankFiles()
    written(files, 1, "secret")
    (folder,) = temporary.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(os.stat(files.log(1)).st_mode) == 0o600
    files.finish(keep=False)


def test_after_success_nothing_is_left(temporary):
    files = RankFiles()
    written(files, 1, "text")
    assert files.finish(keep=False) == ()
    assert list(temporary.iterdir()) == []


def test_after_a_failure_output_is_kept_and_records_are_not(temporary):
    files = RankFiles()
    written(files, 1, "text")
    written(files, 2, "")
    for name in (files.failure(1), files.failure(2) + ".1234"):
        with open(name, "w") as file:
            file.write("{}")
    assert files.finish(keep=True) == (files.log(1),)
    (folder,) = temporary.iterdir()
    assert os.listdir(folder) == ["rank-1.log"]


def test_where_nobody_wrote_anything_no_folder_is_kept(temporary):
    files = RankFiles()
    written(files, 1, "")
    assert files.finish(keep=True) == ()
    assert list(temporary.iterdir()) == []


def test_the_folder_of_the_user_keeps_its_files(tmp_path, temporary):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text("from an earlier run")
    files = RankFiles(str(tmp_path / "logs"))
    written(files, 1, "new")
    files.finish(keep=False)
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "new"
    assert list(temporary.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentsError, match=r"--log_dir .*file/logs cannot be made: Not a directory"):
        RankFiles(str(tmp_path / "file" / "logs"))


def test_the_tail_is_the_last_lines_as_a_terminal_shows_them():
    files = RankFiles()
    written(files, 1, "".join(f"line {i}\n" for i in range(50_000)) + " 1%|\r 2%|\r 3%|\nlast\r\n")
    assert files.tail(1, most=3) == ("line 49999", " 3%|", "last")
    assert len(files.tail(1)) == 30
    written(files, 2, "")
    assert files.tail(2) == ()
    assert files.tail(0) == ()
    files.finish(keep=False)


def test_what_ranks_wrote_is_shown_once_and_line_by_line():
    files = RankFiles()
    written(files, 1, "one\n 1%|\r 2%|\ntwo, in")
    written(files, 2, "")
    assert next(files.unseen()) == "[rank 1] one"
    assert list(files.unseen()) == ["[rank 1]  2%|"]
    written(files, 1, "complete\n")
    written(files, 2, "end")
    assert list(files.unseen()) == ["[rank 1] two, incomplete"]
    assert list(files.unseen(last=True)) == ["[rank 2] end"]
    assert list(files.unseen(last=True)) == []
    files.finish(keep=False)


def test_the_next_generation_writes_behind_the_last_and_finds_nothing_that_it_told(temporary):
    files = RankFiles()
    written(files, 1, "first\n")
    for name in (files.failure(1), files.stop(1)):
        with open(name, "w") as file:
            file.write("{}")
    files.forget()
    written(files, 1, "second\n")
    assert files.tail(1) == ("first", "second")
    assert os.listdir(files.private) == ["rank-1.log"]
    files.finish(keep=False)
