"""Checkpoints of this job, and those that were there before."""

import os
import time
from datetime import datetime, timezone

import pytest

from allstep.checkpoint.job import is_of_this_job, job_name, launched_at
from allstep.checkpoint.manifest import Manifest

LAUNCHED = datetime(2026, 1, 31, 12, 0, 0, 500_000, tzinfo=timezone.utc).timestamp()


def written(created, job=""):
    return Manifest(
        global_step=1,
        epoch=0.1,
        world_size=2,
        global_batch_size=4,
        files={},
        created=created,
        allstep_version="0",
        torch_version="0",
        job=job,
    )


@pytest.mark.parametrize(
    ("created", "is_own"),
    [("2026-01-31T11:59:58+00:00", False), ("2026-01-31T12:00:00+00:00", True), ("2026-01-31T12:30:00+00:00", True)],
)
def test_what_was_written_since_the_launch_is_of_this_job(created, is_own):
    assert is_of_this_job(written(created), "", LAUNCHED) is is_own
    assert is_of_this_job(written(created, "other"), "", LAUNCHED) is is_own


def test_agents_that_share_a_name_share_checkpoints_whenever_they_joined():
    early, late = "2026-01-31T10:00:00+00:00", "2026-01-31T13:00:00+00:00"
    assert is_of_this_job(written(early, "mine"), "mine", LAUNCHED)
    assert not is_of_this_job(written(late, "other"), "mine", LAUNCHED)


@pytest.mark.parametrize(
    ("variables", "name"), [({}, ""), ({"TORCHELASTIC_RUN_ID": "none"}, ""), ({"TORCHELASTIC_RUN_ID": "a"}, "a")]
)
def test_the_name_is_torchruns(variables, name):
    assert job_name(variables) == name


def test_a_launcher_was_started_before_now_and_after_the_machine():
    assert time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) <= launched_at() + 1
    assert launched_at() <= time.time()
    assert os.getppid() > 0


def test_a_name_comes_back_from_the_manifest():
    text = written("2026-01-31T12:00:00+00:00", "mine").to_json()
    assert Manifest.from_json(text).job == "mine"
