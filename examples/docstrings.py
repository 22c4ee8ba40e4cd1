"""The text of finetune_minilm.py: docstrings of Python's standard library, each with the package that it stands in.

The sources are read, never run. Every machine with Python has them; which docstrings there are depends on its version.
"""

import ast
import math
import random
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

PACKAGES = (
    "asyncio", "decimal", "email", "http", "importlib", "inspect",
    "logging", "multiprocessing", "tarfile", "unittest", "urllib", "xml",
)  # fmt: skip
MASK = "[MASK]"  # what models of BERT's family know as a missing word
FEWEST_WORDS = 5


class Docstring(TypedDict):
    text: str
    label: int  # its package, by number in PACKAGES


def read_docstrings(at_most: int | None = None) -> tuple[list[Docstring], list[Docstring]]:
    """(to train on, to test with): all docstrings, or `at_most` of each package; of each package one in five is for the test.

    The names of the packages are masked wherever they stand, also within longer words. Texts of the same words count as one,
    and are left out where they stand in several packages: none is in both lists.
    """
    found: dict[str, dict[int, str]] = {}  # the words of a text → the packages that it stands in, and how it reads there
    for label, package in enumerate(PACKAGES):
        for text in map(mask_names, _docstrings_of(package)):
            found.setdefault(" ".join(words(text)), {}).setdefault(label, text)
    texts: list[list[str]] = [[] for _ in PACKAGES]
    for key, places in found.items():
        if len(places) == 1 and key.count(" ") >= FEWEST_WORDS - 1:
            ((label, text),) = places.items()
            texts[label].append(text)
    training: list[Docstring] = []
    test: list[Docstring] = []
    for label, of_package in enumerate(texts):
        random.Random(label).shuffle(of_package)
        rows = [Docstring(text=text, label=label) for text in of_package[:at_most]]
        held_out = len(rows) // 5
        test += rows[:held_out]
        training += rows[held_out:]
    return training, test


def mask_names(text: str) -> str:
    return re.sub("|".join(PACKAGES), MASK, text, flags=re.IGNORECASE)


def words(text: str) -> list[str]:
    return re.findall("[a-z]+", text.replace(MASK, " ").lower())


def _docstrings_of(package: str) -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted((root / package).rglob("*.py")) if not {"test", "tests"}.intersection(path.parts)]
    files += [root / f"{package}.py", root / f"_py{package}.py"]  # decimal is written in C, and again in _pydecimal.py
    for path in filter(Path.is_file, files):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how old sources are written
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield " ".join((ast.get_docstring(node) or "").split())


def most_frequent(training: list[Docstring], test: list[Docstring]) -> list[int]:
    """A guess for each text of `test` by one who does not read it: the package with the most docstrings."""
    return [Counter(row["label"] for row in training).most_common(1)[0][0]] * len(test)


def naive_bayes(training: list[Docstring], test: list[Docstring]) -> list[int]:
    """A guess for each text of `test` by one who counts words: naive Bayes, where each word was seen once more than it was."""
    counts = [Counter[str]() for _ in PACKAGES]
    for row in training:
        counts[row["label"]].update(words(row["text"]))
    frequency = Counter(row["label"] for row in training)
    vocabulary = len(set().union(*counts))
    totals = [each.total() + vocabulary for each in counts]

    def likelihood(label: int, text: list[str]) -> float:
        return math.log(frequency[label] + 1) + sum(math.log((counts[label][word] + 1) / totals[label]) for word in text)

    texts = [words(row["text"]) for row in test]
    return [max(range(len(PACKAGES)), key=lambda label: likelihood(label, text)) for text in texts]
