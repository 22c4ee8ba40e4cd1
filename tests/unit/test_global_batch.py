"""Accumulation follows from the global batch; where it does not divide, the error holds the numbers and what would."""

import pytest

from allstep.data.global_batch import accumulation_for
from allstep.errors import ArgumentsError


@pytest.mark.parametrize(("whole", "part", "ranks", "expected"), [(16, 8, 2, 1), (16, 8, 1, 2), (16, 2, 4, 2), (7, 7, 1, 1)])
def test_micro_batches_make_up_the_global_batch(whole, part, ranks, expected):
    assert accumulation_for(whole, part, ranks) == expected


@pytest.mark.parametrize(
    ("whole", "part", "ranks", "said"),
    [
        (16, 8, 4, ["16 / (4 x 8) = 0.5", "per_device_train_batch_size=4", "2 rank(s)", "global_batch_size=32"]),
        (24, 8, 2, ["24 / (2 x 8) = 1.5", "per_device_train_batch_size=6", "size=12", "1 or 3 rank(s)", "size=16 or 32"]),
        (24, 4, 5, ["24 / (5 x 4) = 1.2", "3 or 6 rank(s)", "global_batch_size=20 or 40"]),
        (6, 4, 4, ["6 / (4 x 4) = 0.375", "Use global_batch_size=16."]),
    ],
)
def test_what_does_not_divide_is_refused_with_numbers_and_choices(whole, part, ranks, said):
    with pytest.raises(ArgumentsError) as error:
        accumulation_for(whole, part, ranks)
    for text in said:
        assert text in str(error.value)


def test_each_number_that_is_proposed_divides():
    with pytest.raises(ArgumentsError) as error:
        accumulation_for(48, 9, 4, of_whom="The global batch of the run that is resumed")
    assert str(error.value).startswith("The global batch of the run that is resumed is 48 samples, which 4 rank(s)")
    assert "per_device_train_batch_size=6, or per_device_train_batch_size=12" in str(error.value)
    assert accumulation_for(48, 6, 4) == 2
    assert accumulation_for(48, 12, 4) == 1
