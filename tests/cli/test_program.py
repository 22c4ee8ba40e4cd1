import subprocess
import sys

import pytest

import allstep as package


def test_the_program_tells_its_version(allstep):
    assert allstep("--version").stdout.strip() == f"allstep, version {package.__version__}"


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_names_the_commands(allstep, option):
    end = allstep(option)
    assert end.returncode == 0
    assert "Usage: allstep [OPTIONS] COMMAND" in end.stdout
    assert "launch" in end.stdout


def test_every_command_has_help(allstep):
    from allstep.cli.main import _COMMANDS

    for name in _COMMANDS:
        end = allstep(name, "--help")
        assert end.returncode == 0, end.stderr
        assert f"Usage: allstep {name}" in end.stdout


def test_an_unknown_command_is_an_error(allstep):
    end = allstep("lunch")
    assert end.returncode == 2
    assert "lunch" in end.stderr


@pytest.mark.parametrize(
    "module", ["allstep", "allstep.cli.main", "allstep.cli.launch", "allstep.launch.agent", "allstep.launch.worker"]
)
def test_neither_the_program_nor_the_launcher_loads_torch_or_numpy(module):
    code = f"import sys, {module}; assert not {{'torch', 'numpy'}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_of_the_program_loads_no_command():
    code = "import sys; from allstep.cli.main import main; main(['--help'], standalone_mode=False); print([*sys.modules])"
    end = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "allstep.cli.main" in end.stdout
    assert "allstep.cli.launch" not in end.stdout
