"""Files that allstep does not read because reading them can run code: what to type in Python to have others instead."""

import re
from pathlib import Path

__all__ = ["state_in_python", "weights_in_python"]

_NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|data|rng_state(_\d+)?|model_extra_state)\.\w+")
"""Files of a checkpoint that are in torch's format and hold no weights."""


def weights_in_python(folder: Path, name: str) -> str:
    """What to type where there are weights in a format that allstep does not read; nothing where there are none."""
    kinds = ("*.bin", "*.pt", "*.pth")
    found = sorted(path for kind in kinds for path in folder.glob(kind) if not _NO_WEIGHTS.fullmatch(path.name))
    adapters = [path for path in found if path.name == "adapter_model.bin"]
    if adapters:
        found, name = adapters, "adapter_model.safetensors"
    if not found:
        return ""
    read = " | ".join(f"torch.load({str(path)!r}, weights_only=True)" for path in found)
    return (
        f" {found[0].name} is a pickled file, which allstep does not read: reading it can run code. Convert it, in Python, "
        f"with nothing but tensors taken from it: import torch, safetensors.torch; safetensors.torch.save_file({{name: "
        f"tensor.clone() for name, tensor in ({read}).items()}}, {str(folder / name)!r})"
    )


def state_in_python(path: Path, *, runs_code: bool) -> str:
    """What to type where `path`, a file of plain values, is in another format, or has objects in it."""
    if not runs_code:
        return (
            f"If it is whole and in an older format of torch's, write it anew in Python: import torch; torch.save(torch.load("
            f"{str(path)!r}, weights_only=True), {str(path)!r})"
        )
    return (
        f"If you trust whoever wrote it, keep what is plain in it, in Python (this runs its code): import torch; torch.save("
        f"{{k: v for k, v in torch.load({str(path)!r}, weights_only=False).items() if isinstance(v, (torch.Tensor, int, float, "
        f"str, list, dict))}}, {str(path)!r})"
    )
