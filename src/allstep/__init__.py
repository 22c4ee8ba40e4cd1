"""Data-parallel training for PyTorch. `import allstep` loads nothing heavy; each public name is loaded on first use."""

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # as typing's, which takes longer to import than all that is in here
if TYPE_CHECKING:
    from allstep.argument_parser import ArgumentParser
    from allstep.arguments import TrainingArguments
    from allstep.arguments_seq2seq import Seq2SeqTrainingArguments
    from allstep.comm.agreement import all_ranks_agree
    from allstep.comm.process_group import join, leave
    from allstep.ddp.module import DistributedDataParallel
    from allstep.ddp.sync_batchnorm import SyncBatchNorm
    from allstep.environment import WorkerEnvironment
    from allstep.notebook import notebook_launcher
    from allstep.trainer.callbacks.early_stopping import EarlyStoppingCallback
    from allstep.trainer.callbacks.flow import DefaultFlowCallback, PrinterCallback, ProgressCallback
    from allstep.trainer.callbacks.handler import TrainerCallback
    from allstep.trainer.state import ExportableState, TrainerControl, TrainerState
    from allstep.trainer.surface.seq2seq import Seq2SeqTrainer
    from allstep.trainer.trainer import Trainer

_HOMES = {
    "ArgumentParser": "allstep.argument_parser",
    "DefaultFlowCallback": "allstep.trainer.callbacks.flow",
    "DistributedDataParallel": "allstep.ddp.module",
    "EarlyStoppingCallback": "allstep.trainer.callbacks.early_stopping",
    "ExportableState": "allstep.trainer.state",
    "PrinterCallback": "allstep.trainer.callbacks.flow",
    "ProgressCallback": "allstep.trainer.callbacks.flow",
    "Seq2SeqTrainer": "allstep.trainer.surface.seq2seq",
    "Seq2SeqTrainingArguments": "allstep.arguments_seq2seq",
    "SyncBatchNorm": "allstep.ddp.sync_batchnorm",
    "Trainer": "allstep.trainer.trainer",
    "TrainerCallback": "allstep.trainer.callbacks.handler",
    "TrainerControl": "allstep.trainer.state",
    "TrainerState": "allstep.trainer.state",
    "TrainingArguments": "allstep.arguments",
    "WorkerEnvironment": "allstep.environment",
    "all_ranks_agree": "allstep.comm.agreement",
    "join": "allstep.comm.process_group",
    "leave": "allstep.comm.process_group",
    "notebook_launcher": "allstep.notebook",
}

__all__ = [
    "ArgumentParser",
    "DefaultFlowCallback",
    "DistributedDataParallel",
    "EarlyStoppingCallback",
    "ExportableState",
    "PrinterCallback",
    "ProgressCallback",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "SyncBatchNorm",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "WorkerEnvironment",
    "all_ranks_agree",
    "join",
    "leave",
    "notebook_launcher",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'allstep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
