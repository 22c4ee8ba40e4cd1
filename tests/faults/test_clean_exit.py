"""A rank that has joined ends cleanly: none of the group's threads outlives `leave`.

Such a thread may still want the interpreter while that is being taken down, which ends the process by SIGABRT, now and then.
"""

import json
import os
import subprocess
import sys
import textwrap

from allstep.comm.process_group import World

SCRIPT = textwrap.dedent(
    """
    import os
    import torch
    import allstep

    world = allstep.join()
    model = allstep.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())  # imports what keeps the default group that it finds
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    allstep.leave()
    threads = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
    print(world.to_json())
    print([name for name in threads if "gloo" in name or "tcpstore" in name])
    """
)


def test_no_thread_of_the_group_outlives_leave(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "allstep", "launch", "--num_processes", "2", "--log_dir", str(tmp_path), "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    for output in (done.stdout, (tmp_path / "rank-1.log").read_text()):
        lines = output.strip().splitlines()
        assert World(**json.loads(lines[-2])).size == 2
        assert lines[-1] == "[]"
