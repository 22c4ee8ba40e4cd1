"""What sums in order hold in memory is said before training, and where they are not those of other world sizes."""

import pytest

from allstep.data.grid import Grid
from allstep.trainer.assembly import order_line


@pytest.mark.parametrize(
    ("micro_batches", "ranks", "said"),
    [
        (1, 1, None),
        (4, 2, None),
        (8, 2, ["over 4 micro-batches a rank: 1 more set(s) of gradients are held, 3.0 MiB"]),
        (8, 1, ["over 8 micro-batches a rank: 2 more set(s) of gradients are held, 6.0 MiB"]),
        (32, 2, ["3 more set(s)"]),
        (3, 1, ["1 more set(s)"]),
        (6, 2, ["1 more set(s)", "each rank runs 3 micro-batches, which is no power of two"]),
    ],
)
def test_the_line_says_sets_and_bytes(micro_batches, ranks, said):
    line = order_line(Grid(samples=100, micro_batch_size=1, micro_batches_per_step=micro_batches), ranks, 3 << 20)
    if said is None:
        assert line is None
    else:
        assert all(text in line for text in said)
