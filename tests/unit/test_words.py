"""Words that several parts say alike."""

import pytest

from allstep.words import ranks_in_words


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([3], "rank 3"), ([2, 0], "ranks 0 and 2"), ([0, 1, 2, 3, 7], "ranks 0-3 and 7"), ([1, 3, 5], "ranks 1, 3 and 5")],
)
def test_ranks_are_said_as_a_person_says_them(ranks, words):
    assert ranks_in_words(ranks) == words
