"""What the tests of the command line share: running `python -m allstep` with a clean environment and a folder of its own."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the program puts temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def clean(temporary: Path) -> dict[str, str]:
    """An environment in which nobody chose anything for the launcher."""
    rest = {name: value for name, value in os.environ.items() if name not in UNSET and not name.startswith("MALLOC_")}
    return {**rest, "TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def allstep(tmp_path: Path, clean: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the program in `tmp_path` and return how it ended."""

    def run(*arguments: str, typed: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "allstep", *arguments],
            cwd=tmp_path,
            env={**clean, **variables},
            input=typed,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script into `tmp_path`; gives its name."""

    def write(code: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code))
        return name

    return write
