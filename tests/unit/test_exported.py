"""The public surface is declared: sorted, complete, and quick to import."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import allstep

MODULES = sorted(module.name for module in pkgutil.walk_packages(allstep.__path__, "allstep."))


def constants_classes_functions(name):
    """The order in which ruff keeps `__all__`."""
    return not name.isupper(), not name[0].isupper(), name


def test_the_package_exports_what_it_says_sorted():
    assert allstep.__all__ == sorted(allstep.__all__)
    for name in allstep.__all__:
        exported = getattr(allstep, name)
        assert exported is getattr(importlib.import_module(exported.__module__), name)
    assert set(allstep.__all__) <= set(dir(allstep))
    assert set(allstep._HOMES) == set(allstep.__all__)


def test_a_star_import_gives_just_these_names():
    namespace = {}
    exec("from allstep import *", namespace)
    assert namespace.keys() - {"__builtins__"} == set(allstep.__all__)


def test_type_checkers_see_the_same_names_from_the_same_modules():
    import ast
    from pathlib import Path

    tree = ast.parse(Path(allstep.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert typed == allstep._HOMES


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'allstep' has no attribute 'Trainor'"):
        _ = allstep.Trainor


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_every_module_says_what_is_public_sorted(name):
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):  # packages only hold modules
        return
    assert module.__all__ == sorted(module.__all__, key=constants_classes_functions)
    assert len(set(module.__all__)) == len(module.__all__)
    for exported in module.__all__:
        assert getattr(module, exported) is not None


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout


def test_importing_the_package_loads_neither_torch_nor_numpy():
    loaded = run("import sys, allstep; allstep.TrainingArguments; allstep.WorkerEnvironment; print(*sys.modules)").split()
    assert "allstep.arguments" in loaded
    assert not {"torch", "numpy", "click", "tqdm"} & {*loaded}


def test_a_name_that_is_not_there_does_not_load_torch_either():
    assert "torch" not in run("import sys, allstep; hasattr(allstep, 'nothing'); print(*sys.modules)").split()
