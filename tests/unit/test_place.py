"""Where a rank says it is."""

import json
import threading

from allstep.comm.watchdog.place import Place, user_frames_of


def test_a_place_tells_phase_step_and_wait():
    place = Place()
    place.step, place.micro_batch = 3, 1
    place.enter("backward")
    with place.wait("all_reduce", lambda: "bucket 1 of 2"):
        told = json.loads(json.dumps(place.told()))
    assert (told["phase"], told["step"], told["micro_batch"]) == ("backward", 3, 1)
    assert (told["waiting"], told["detail"]) == ("all_reduce", "bucket 1 of 2")
    assert place.told()["waiting"] is None
    assert place.waited > 0


def test_the_outer_of_two_waits_is_what_counts():
    place = Place()
    with place.wait("outer", lambda: "more"), place.wait("inner"):
        assert (place.waiting, place.told()["detail"]) == ("outer", "more")
    assert place.waiting is None


def test_a_wait_that_breaks_off_is_over():
    place = Place()
    try:
        with place.wait("all_reduce"):
            raise RuntimeError
    except RuntimeError:
        pass
    assert place.waiting is None


def test_within_comes_back_to_the_phase_of_before():
    place = Place()
    place.enter("callbacks")
    with place.within("evaluate"):
        assert place.phase == "evaluate"
    assert place.phase == "callbacks"


def test_a_detail_that_fails_is_left_out():
    place = Place()
    with place.wait("all_reduce", lambda: str(1 / 0)):
        assert place.told()["detail"] == ""


def test_frames_are_those_of_the_users_files_and_what_they_called():
    frames = user_frames_of(threading.main_thread().ident)
    assert any("test_place.py" in frame and "test_frames_are" in frame for frame in frames)
    assert user_frames_of(None) == []
