"""One rank for all tests of this folder, with transformers imported once."""

from collections.abc import Iterator

import pytest

from allstep.testing.ranks import RankPool


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()
