"""Processes are found by what they were started with."""

import os
import subprocess
import sys
import uuid

from allstep.testing.processes import processes_with


def test_a_process_is_found_by_its_variable_until_it_has_ended():
    name, value = "ALLSTEP_TEST_MARK", uuid.uuid4().hex
    program = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(program, env={**os.environ, name: value}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert processes_with(f"{name}={value}") == [process.pid]
        assert processes_with(f"{name}={value[:-1]}") == []
        process.communicate(b"\n")
    assert processes_with(f"{name}={value}") == []
