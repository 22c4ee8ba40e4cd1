"""The settings of a launch: their words, here and in torchrun and accelerate, and which of several values counts. Pure.

A value comes from a flag, else from an environment variable, else from a file, else it is the default; for each setting by
itself, so that a flag for one never drops what the file says of another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allstep.errors import ArgumentsError

__all__ = ["SETTINGS", "Setting", "Value", "resolve"]

Plain = str | int | float | bool | None

FLAG, VARIABLE, FILE, DEFAULT = range(4)
"""Where a value may come from; the lower one wins."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting. Its name is its flag and its key in a file; ALLSTEP_ and its name in capitals is its variable."""

    name: str
    help: str
    kind: type = str
    metavar: str = "X"
    default: Plain = None
    others: tuple[str, ...] = ()
    """Other words for it: flags and keys of torchrun and accelerate with the same meaning."""
    variables: tuple[str, ...] = ()
    """Variables of torchrun and accelerate with the same meaning."""
    short: str = ""
    choices: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Every flag or key that sets it."""
        return (self.name, *self.others)

    @property
    def all_variables(self) -> tuple[str, ...]:
        """Every environment variable that sets it."""
        return (f"ALLSTEP_{self.name.upper()}", *self.variables)


SETTINGS = (
    Setting(
        name="num_processes",
        kind=int,
        metavar="N",
        help="Ranks to start, on all machines together. Default: one per visible GPU, else 1 per machine.",
    ),
    Setting(
        name="nproc_per_node",
        metavar="N",
        help="Ranks to start on each machine: a number, gpu (one per GPU), cpu (one per core), or auto (gpu, else cpu).",
        variables=("PET_NPROC_PER_NODE",),
    ),
    Setting(
        name="num_machines",
        metavar="M",
        default="1",
        help="Machines of the job; start this command on each. MIN:MAX hands the job to torch's elastic agent.",
        others=("nnodes",),
        variables=("PET_NNODES",),
    ),
    Setting(
        name="machine_rank",
        kind=int,
        metavar="I",
        help="Number of this machine, 0 to M - 1. Rank 0 runs on machine 0.",
        others=("node_rank",),
        variables=("PET_NODE_RANK",),
    ),
    Setting(
        name="main_process_ip",
        metavar="HOST",
        help="Name or address of machine 0, as the others reach it. Needed for several machines.",
        others=("master_addr",),
        variables=("PET_MASTER_ADDR",),
    ),
    Setting(
        name="main_process_port",
        kind=int,
        metavar="P",
        default=0,
        help="Port on which machine 0 meets the others. Default: a free one; 29500 on several machines.",
        others=("master_port",),
        variables=("PET_MASTER_PORT",),
    ),
    Setting(
        name="gpu_ids",
        metavar="IDS",
        help="GPUs to use on this machine, such as 0,1 (CUDA_VISIBLE_DEVICES, or what other devices have for it), or all.",
    ),
    Setting(
        name="cpu",
        kind=bool,
        default=False,
        help="Keep to the CPU, also where there are GPUs (ACCELERATE_USE_CPU=true, which allstep and accelerate read).",
        others=("use_cpu",),
        variables=("ACCELERATE_USE_CPU",),
    ),
    Setting(
        name="mixed_precision",
        metavar="KIND",
        help="no, fp16 or bf16, for scripts that say none themselves: allstep's Trainer and accelerate read it "
        "(ACCELERATE_MIXED_PRECISION).",
        variables=("ACCELERATE_MIXED_PRECISION",),
        choices=("no", "fp16", "bf16"),
    ),
    Setting(
        name="num_cpu_threads_per_process",
        kind=int,
        metavar="T",
        help="CPU threads of each rank. Default: OMP_NUM_THREADS, else the cores of this job divided by its ranks.",
    ),
    Setting(
        name="max_restarts",
        kind=int,
        metavar="R",
        default=0,
        help="How often all ranks are started again after a failure, before the job is given up.",
        variables=("PET_MAX_RESTARTS",),
    ),
    Setting(
        name="monitor_interval",
        kind=float,
        metavar="S",
        default=1.0,
        help="Seconds after which the launcher looks for what no signal tells, such as a rank that failed and hangs.",
        variables=("PET_MONITOR_INTERVAL",),
    ),
    Setting(
        name="grace_period",
        kind=float,
        metavar="S",
        default=10.0,
        help="Seconds a rank has to end after SIGTERM before it is killed.",
        others=("shutdown_timeout",),
    ),
    Setting(
        name="log_dir",
        metavar="DIR",
        help="Keep the output of the ranks other than 0 here. Default: a private folder, kept only after a failure.",
        variables=("PET_LOG_DIR",),
    ),
    Setting(
        name="tee",
        kind=bool,
        default=False,
        short="-t",
        help="Show the output of all ranks on this terminal too, each line with its rank. torchrun's values 1 to 3 may follow.",
    ),
    Setting(
        name="run_id",
        metavar="NAME",
        help="Name of the job, the same on all its machines and another for each job. Default: a random one.",
        others=("rdzv_id",),
        variables=("PET_RDZV_ID",),
    ),
    Setting(
        name="rdzv_backend",
        metavar="KIND",
        help="static, or c10d or etcd-v2, for which the job is handed to torch's elastic agent where M is more than 1.",
        variables=("PET_RDZV_BACKEND",),
    ),
    Setting(
        name="rdzv_endpoint",
        metavar="H:P",
        help="Host and port of the rendezvous: main_process_ip and main_process_port in one.",
        variables=("PET_RDZV_ENDPOINT",),
    ),
    Setting(name="rdzv_conf", metavar="K=V", help="For torch's elastic agent.", variables=("PET_RDZV_CONF",)),
    Setting(
        name="standalone",
        kind=bool,
        default=False,
        help="One machine that meets nobody; the default here.",
        variables=("PET_STANDALONE",),
    ),
)

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True)
class Value:
    """What a setting came to, and why."""

    value: Plain
    origin: str
    """The flag, variable or file that said it, or "default"."""
    level: int
    """How close to the user it was said: FLAG, VARIABLE, FILE or DEFAULT."""


def resolve(
    flags: Mapping[str, Plain], variables: Mapping[str, str], file: Mapping[str, Plain], file_name: str = "file"
) -> dict[str, Value]:
    """Name of each setting → its value: that of a flag, else of a variable, else of the file, else the default.

    Args:
        flags: by the word that was typed, without dashes in front; None where it was not typed.
        variables: the environment.
        file: by key, checked for unknown ones before.
        file_name: as the user knows it, for origins and messages.

    Raises:
        ArgumentsError: two words for one setting say different things, or a text cannot be what it should be. One message
            lists all problems.
    """
    found: dict[str, Value] = {}
    problems: list[str] = []
    for setting in SETTINGS:
        said = (
            [(f"--{word}", flags.get(word)) for word in setting.words],
            # an empty variable says nothing, as everywhere
            [(name, variables.get(name) or None) for name in setting.all_variables],
            [(f"{word} in {file_name}", file.get(word)) for word in setting.words],
        )
        try:
            found[setting.name] = _first(setting, said)
        except ArgumentsError as error:
            problems.append(str(error))
    if problems:
        raise ArgumentsError(" ".join(problems))
    return found


def _first(setting: Setting, said: Sequence[Sequence[tuple[str, Plain]]]) -> Value:
    """The value of the first level that says anything."""
    for level, entries in enumerate(said):
        values = [(origin, _typed(setting, raw, origin)) for origin, raw in entries if raw is not None]
        if not values:
            continue
        origin, value = values[0]
        # Of variables the first one wins: ours was set for this launcher, theirs perhaps for another.
        other = next((other for other in values[1:] if other[1] != value), None) if level != VARIABLE else None
        if other is not None:
            raise ArgumentsError(
                f"{origin} {value} and {other[0]} {other[1]} are two words for one thing and say different things: "
                "leave one of them out."
            )
        return Value(value, origin, level)
    return Value(setting.default, "default", DEFAULT)


def _typed(setting: Setting, raw: Plain, origin: str) -> Plain:
    """`raw` as the kind of value that the setting has."""
    text = str(raw).strip()
    if setting.kind is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ArgumentsError(f"{origin} is {text!r}: expected true or false.")
        return text.lower() in _TRUE
    try:
        value: Plain = setting.kind(text)
    except ValueError:
        expected = "a whole number" if setting.kind is int else "a number"
        raise ArgumentsError(f"{origin} is {text!r}: expected {expected}.") from None
    if setting.choices:
        value = {"false": "no"}.get(text.lower(), text.lower())  # YAML reads a bare no as false
        if value not in setting.choices:
            instead = " fp8 is not there yet: bf16 trains on all recent GPUs." if value == "fp8" else ""
            raise ArgumentsError(f"{origin} is {text!r}: expected {', '.join(setting.choices)}.{instead}")
    return value
