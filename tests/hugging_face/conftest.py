"""A rank that has loaded transformers, which takes seconds, for all files here."""

from collections.abc import Iterator

import pytest

from allstep.testing.ranks import RankPool


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()
