"""Pages of docs that are made from the source are those that would be made now."""

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from allstep._arguments.standing import NOTHING_TO_DO, OURS, REFUSED
from allstep.arguments import TrainingArguments

DOCS = Path(__file__).parents[2] / "docs"
NAMES = {each.name for each in dataclasses.fields(TrainingArguments)}


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_arguments", DOCS / "generate_arguments.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_pages_are_up_to_date(pages: ModuleType) -> None:
    advice = "the source says something else: run python docs/generate_arguments.py"
    assert (DOCS / "arguments.md").read_text() == pages.arguments_page(), f"docs/arguments.md is old, {advice}"
    text = (DOCS / "migrating.md").read_text()
    assert text == pages.migrating_page(text), f"docs/migrating.md is old, {advice}"


def test_every_argument_is_in_the_pages_once(pages: ModuleType) -> None:
    arguments, migrating = pages.arguments_page(), pages.standing_table()
    for name in NAMES:
        assert arguments.count(f"\n| `{name}` |") == 1
        assert migrating.count(f"\n| `{name}` |") == (name not in OURS)


def test_no_argument_stands_in_two_places(pages: ModuleType) -> None:
    assert pages.BETTER.keys() <= NAMES
    assert not pages.BETTER.keys() & (NOTHING_TO_DO.keys() | REFUSED.keys() | OURS)


def test_an_old_page_is_found(pages: ModuleType) -> None:
    text = (DOCS / "migrating.md").read_text()
    assert pages.migrating_page(text.replace("| `bf16` | same | |\n", "")) == text
