"""Imports go one way: the layers of the package, read from its source."""

import ast
from pathlib import Path

import allstep

ROOT = Path(allstep.__file__).parent

LEVELS = {
    "arguments": 0,
    "argument_parser": 0,
    "arguments_seq2seq": 0,
    "errors": 0,
    "environment": 0,
    "words": 0,
    "devices": 0,
    "launchers": 0,
    "comm": 1,
    "launch": 1,
    "checkpoint": 2,
    "data": 2,
    "ddp": 2,
    "report": 2,
    "trainer": 3,
    "notebook": 3,
    "cli": 4,
    "__main__": 5,
    "testing": 6,
}
"""Part of the package -> level; a part may import from lower levels, and from itself."""

THIRD_PARTY = {
    0: set(),
    "launch": set(),
    "cli": {"click"},
    "__main__": set(),
    "report": {"torch", "tqdm"},
}
"""Level or part -> packages that it may import beside the standard library; those not named may import what they like."""

REACHING_UP = {"allstep._arguments.process": {"allstep.comm.communicator", "allstep.comm.process_group", "torch"}}
"""Module -> what it loads from above, in the moment in which a script asks arguments for their device or for a barrier."""

MEASURING = "allstep.cli.bench.programs."
"""What runs in the ranks of `allstep bench`: it imports torch, and calls the operations that it measures."""


def part_of(module: str) -> str:
    """allstep.ddp.module -> ddp; modules beside arguments belong to its level."""
    name = module.split(".")[1]
    return "arguments" if name.startswith(("_argument", "arguments_")) else name


def level_of(module: str) -> int:
    return LEVELS[part_of(module)]


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["allstep", *path.relative_to(ROOT).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function; from allstep, down to the module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in MODULES else str(node.module))
    return names


OWN = {
    name: {other for other in imports(path) if other.startswith("allstep.")}
    for name, path in MODULES.items()
    if name != "allstep"  # its names are loaded on first use
}


def test_every_part_has_a_level():
    assert {part_of(name) for name in OWN} <= LEVELS.keys()


def test_imports_go_down_only():
    wrong = [
        f"{name} imports {other}"
        for name, others in OWN.items()
        for other in others
        if part_of(name) != part_of(other) and level_of(other) >= level_of(name) and level_of(name) != 0
    ]
    assert not wrong


def test_level_zero_imports_level_zero_only():
    wrong = [
        f"{name} imports {other}"
        for name, others in OWN.items()
        for other in others - REACHING_UP.get(name, set())
        if level_of(name) == 0 < level_of(other)
    ]
    assert not wrong


def test_nothing_imports_testing():
    for name, others in OWN.items():
        if part_of(name) != "testing":
            assert "testing" not in {part_of(other) for other in others}, name


def test_the_package_itself_is_imported_for_its_version_only():
    """Its other names are loaded from everywhere, also from layers above."""
    for name, path in MODULES.items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "allstep"}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module == "allstep":
                used |= {alias.name for alias in node.names if f"allstep.{alias.name}" not in MODULES}
        assert used <= {"__version__"} | {other.split(".")[1] for other in OWN}, name


def test_what_has_to_be_light_imports_nothing_heavy():
    for name, path in MODULES.items():
        if name == "allstep":
            allowed = set()
        else:
            part, level = part_of(name), level_of(name)
            if name.startswith(MEASURING):
                continue
            if part not in THIRD_PARTY and level not in THIRD_PARTY:
                continue
            allowed = THIRD_PARTY.get(part, THIRD_PARTY.get(level))
        foreign = {other.split(".")[0] for other in imports(path) - REACHING_UP.get(name, set())} - {"allstep"}
        assert foreign & {"torch", "numpy", "click", "tqdm", "safetensors", "transformers", "accelerate"} <= allowed, name


def test_only_comm_speaks_to_torch_distributed():
    for name, path in MODULES.items():
        if name == "allstep" or part_of(name) in ("comm", "testing") or name.startswith(MEASURING):
            continue
        calls = {
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        assert not {call for call in calls if call.startswith(("dist.", "torch.distributed."))}, name


def test_nothing_but_the_ranks_of_the_benchmark_loads_what_runs_there():
    for name, others in OWN.items():
        if not name.startswith(MEASURING):
            assert not {other for other in others if other.startswith(MEASURING)}, name


def test_no_modules_import_one_another_in_a_circle():
    left = {name: {other for other in others if other in OWN and other != name} for name, others in OWN.items()}
    while ready := [name for name, others in left.items() if not others & left.keys()]:
        for name in ready:
            del left[name]
    assert not left, f"these import one another: {sorted(left)}"


def test_the_reader_of_imports_finds_those_that_are_there():
    """Guards the tests above against passing because nothing was read."""
    assert "allstep.ddp.reducer" in OWN["allstep.ddp.module"]
    assert "allstep.trainer.loop" in OWN["allstep.trainer.trainer"]
    assert "torch" in imports(MODULES["allstep.ddp.reducer"])
    assert len(OWN) > 40
