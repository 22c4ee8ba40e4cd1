"""What arguments say of this process: rank, device, what it logs, and who goes first."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING

from allstep._arguments.choices import LOG_LEVELS
from allstep._arguments.run_fields import RunFields
from allstep.environment import WorkerEnvironment

if TYPE_CHECKING:
    import torch

__all__ = ["ParallelMode", "ProcessArguments"]


class ParallelMode(str, Enum):
    """How several devices work together; equal to the member of that value in Hugging Face's enum."""

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, Enum) else other)

    def __hash__(self) -> int:
        return hash(self.value)


class ProcessArguments(RunFields):
    """Arguments that know the process that holds them. Where nothing else is said, launcher variables tell."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return _environment().world_size

    @property
    def process_index(self) -> int:
        """This process's rank in the job."""
        return _environment().rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its host."""
        return _environment().local_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its host; -1 where nobody launched it, as in Hugging Face."""
        environment = _environment()
        return environment.local_rank if environment.is_launched else -1

    @local_rank.setter
    def local_rank(self, value: int) -> None:
        """What old launchers pass says less than their variables."""

    @property
    def device(self) -> "torch.device":
        """This rank's own device: the accelerator numbered like its local rank, or the CPU.

        Raises:
            LaunchVariablesError: more ranks on this host than devices.
        """
        from allstep.comm.process_group import choose_device

        environment = _environment()
        return choose_device(environment, use_cpu=self.use_cpu or environment.use_cpu)

    @property
    def n_gpu(self) -> int:
        """Accelerators that this process uses: 1, or 0 on the CPU. Further ones belong to other ranks."""
        return int(self.device.type != "cpu")

    @property
    def _n_gpu(self) -> int:
        return self.n_gpu

    @property
    def parallel_mode(self) -> ParallelMode:
        """DISTRIBUTED where the job has several ranks, else NOT_PARALLEL."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as a time span."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def mixed_precision(self) -> str:
        """Precision of autocast: "fp16", "bf16", or what the launcher was told where neither is set; "no" for none."""
        if self.fp16 or self.bf16:
            return "fp16" if self.fp16 else "bf16"
        return os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"

    @property
    def should_log(self) -> bool:
        """Whether this process logs by `log_level`: rank 0 of each host, or with `log_on_each_node=False` of the job."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes the files that all ranks share: rank 0 does."""
        return self.process_index == 0

    def get_process_log_level(self) -> int:
        """The level for `logging` on this process; where it is "passive", the one that Transformers has, or WARNING."""
        level = LOG_LEVELS[self.log_level if self.should_log else self.log_level_replica]
        if level != LOG_LEVELS["passive"]:
            return level
        transformers = sys.modules.get("transformers")
        return int(transformers.logging.get_verbosity()) if transformers else logging.WARNING

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Collective. Run the block on one process first, and then on the others, which find what it left on disk.

        Joins the job, as a Trainer would, where that has not been done.

        Args:
            local: whether rank 0 of each host goes first, for hosts that share no disk. False: rank 0 of the job.
            desc: what is done, for messages of `logging` at level DEBUG.
        """
        if self.world_size == 1:
            yield
            return
        from allstep.comm.communicator import communicator_for
        from allstep.comm.process_group import join

        join(
            backend=self.ddp_backend,
            timeout=self.ddp_timeout_delta,
            use_cpu=self.use_cpu,
            wait_warning=self.ddp_wait_warning,
        )
        barrier = communicator_for(None).barrier
        is_first = (self.local_process_index if local else self.process_index) == 0
        logger = logging.getLogger(__name__)
        try:
            if not is_first:
                logger.debug("rank %d waits for the first process: %s", self.process_index, desc)
                barrier()
            yield
        finally:
            if is_first:
                logger.debug("rank %d is done and lets the others go: %s", self.process_index, desc)
                barrier()


def _environment() -> WorkerEnvironment:
    return WorkerEnvironment.from_variables(os.environ)
