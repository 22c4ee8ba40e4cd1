"""The text of the fine-tuning example: nothing of the test is known from training, and no text names its package."""

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "examples" / "docstrings.py"


@pytest.fixture(scope="module")
def docstrings():
    spec = importlib.util.spec_from_file_location("docstrings", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lists(docstrings):
    return docstrings.read_docstrings()


def test_no_words_stand_twice_and_so_none_in_both_lists(docstrings, lists):
    training, test = lists
    texts = [" ".join(docstrings.words(row["text"])) for row in (*training, *test)]
    assert len(set(texts)) == len(texts)


def test_words_that_stand_in_two_packages_are_left_out(docstrings, monkeypatch):
    own = {name: [f"This one stands in {letter} alone" for letter in "abcdefghij"] for name in docstrings.PACKAGES[:1]}
    everywhere = ["This text stands everywhere.", "This one is twice, here", "This one IS: twice (here)", "Too short a text"]
    monkeypatch.setattr(docstrings, "_docstrings_of", lambda package: own.get(package, []) + everywhere)
    training, test = docstrings.read_docstrings()
    assert sorted(row["text"] for row in training + test) == next(iter(own.values()))


def test_no_text_names_a_package(docstrings, lists):
    for row in (*lists[0], *lists[1]):
        assert not [name for name in docstrings.PACKAGES if name in row["text"].lower()], row


def test_one_in_five_of_each_package_is_for_the_test(docstrings, lists):
    training, test = (Counter(row["label"] for row in rows) for rows in lists)
    assert set(training) == set(range(len(docstrings.PACKAGES)))
    for label, count in training.items():
        assert test[label] == (count + test[label]) // 5 >= 5


def test_there_can_be_fewer_and_the_same_ones_each_time(docstrings, lists):
    few_training, few_test = docstrings.read_docstrings(at_most=10)
    for rows, count in ((few_training, 8), (few_test, 2)):
        assert len(rows) == count * len(docstrings.PACKAGES)
        assert {row["text"] for row in rows} <= {row["text"] for row in (*lists[0], *lists[1])}


def test_names_are_masked_within_words_too(docstrings):
    assert docstrings.mask_names("A TarFile over HTTPS; see xml.dom") == "A [MASK] over [MASK]S; see [MASK].dom"


def test_counting_words_finds_the_package_of_words_seen_before(docstrings):
    training = [
        {"text": "await the loop", "label": 0},
        {"text": "round the digits", "label": 1},
        {"text": "await a task", "label": 0},
    ]
    test = [{"text": "digits to round", "label": 1}, {"text": "a loop", "label": 0}, {"text": "unknown", "label": 1}]
    assert docstrings.naive_bayes(training, test) == [1, 0, 0]
    assert docstrings.most_frequent(training, test) == [0, 0, 0]
