"""Whose weights all ranks take where they have come apart."""

import pytest

from allstep.trainer.drift import majority


@pytest.mark.parametrize(
    ("digests", "source"),
    [("aab", 0), ("abb", 1), ("abbb", 1), ("ab", 0), ("ba", 0), ("abc", 0), ("aabb", 0), ("cabab", 0), ("cabbb", 2)],
)
def test_most_ranks_win_and_rank_0_where_there_is_no_majority(digests, source):
    assert majority(list(digests)) == source
