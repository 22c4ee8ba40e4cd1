import pytest

from allstep.launch.memory import oom_kills


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/job\n"}, None),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "low 0\noom 3\noom_kill 2\n"}, 2),
        ({"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/memory.events": "oom_kill 1\n"}, 1),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
            },
            5,
        ),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "oom 3\n"}, None),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "oom_kill many\n"}, None),
    ],
    ids=["no groups", "no counts", "version 2", "a container", "version 1", "an old kernel", "no number"],
)
def test_kills_are_read_from_the_control_group(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(str(tmp_path)) == expected


def test_this_machine_can_be_asked():
    count = oom_kills()
    assert count is None or count >= 0
