"""Fixtures for all tests: ranks that are started once, and guards against what a test leaves behind."""

import os
import threading
from collections.abc import Iterator

import hypothesis
import pytest

from allstep.testing.ranks import RankPool

# a busy machine is no reason to fail
hypothesis.settings.register_profile("here", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("here")

_POOLS: dict[tuple[int, str], RankPool] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The tests of a module that names BACKENDS run on ranks of each of them."""
    backends = getattr(metafunc.module, "BACKENDS", ())
    if "backend" in metafunc.fixturenames and backends:
        metafunc.parametrize("backend", backends, indirect=True)


def _pool(size: int, backend: str) -> RankPool:
    pool = _POOLS.get((size, backend))
    if pool is None or not pool.is_alive:
        if pool is not None:
            pool.close()
        _POOLS[size, backend] = pool = RankPool(size, backend=backend)
    return pool


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """What the default group of the ranks is."""
    return str(getattr(request, "param", os.environ.get("ALLSTEP_TEST_BACKEND", "gloo")))


@pytest.fixture
def ranks(backend: str) -> RankPool:
    """Two ranks in one group, kept over the whole session."""
    return _pool(2, backend)


@pytest.fixture
def four_ranks(backend: str) -> RankPool:
    """Four ranks in one group, kept over the whole session."""
    return _pool(4, backend)


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
