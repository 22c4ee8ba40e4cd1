"""Fixtures for all tests: ranks that are started once, and guards against what a test leaves behind."""

import os
import threading
from collections.abc import Iterator

import pytest

from allstep.testing.ranks import RankPool

_POOLS: dict[int, RankPool] = {}


def _pool(size: int) -> RankPool:
    pool = _POOLS.get(size)
    if pool is None or not pool.is_alive:
        if pool is not None:
            pool.close()
        _POOLS[size] = pool = RankPool(size, backend=os.environ.get("ALLSTEP_TEST_BACKEND", "gloo"))
    return pool


@pytest.fixture
def ranks() -> RankPool:
    """Two ranks in one gloo group, kept over the whole session."""
    return _pool(2)


@pytest.fixture
def four_ranks() -> RankPool:
    """Four ranks in one gloo group, kept over the whole session."""
    return _pool(4)


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that changes the environment or leaves a thread of its own running."""
    variables, threads = dict(os.environ), set(threading.enumerate())
    yield
    variables["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    changed = {
        key
        for key in {*variables, *os.environ}
        if variables.get(key) != os.environ.get(key) and not key.startswith("TORCHINDUCTOR_")  # torch sets it at an import
    }
    assert not changed, f"the test changed environment variables: {sorted(changed)}"
    left = [thread for thread in threading.enumerate() if thread not in threads and thread.is_alive() and not thread.daemon]
    assert not left, f"the test left threads running: {left}"
