"""PEFT's adapters as weights of a checkpoint: small parts that are trained, inside a large model that is frozen.

`save_pretrained` of a model of PEFT writes the adapters alone, under names of its own. Which tensor of the model stands under
which name PEFT is asked itself, so that reading is the exact reverse of writing, whatever kind of adapter it is.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

__all__ = ["ADAPTERS_FILE", "AdapterWeights", "adapter_files", "adapter_keys", "changes_only", "has_adapters"]

ADAPTERS_FILE = "adapter_model.safetensors"
"""The weights of one adapter, in the folder itself for the adapter "default", else in one that is called like the adapter."""

Names = dict[tuple[str, str], str]
"""By adapter and name in its file, the key in the model's state_dict."""


class AdapterWeights(dict[Any, Any]):
    """What files of adapters hold, by adapter and name."""


def has_adapters(model: nn.Module) -> bool:
    """Whether `model` is one of PEFT's."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_files(folder: Path) -> dict[str, str]:
    """The files of adapters in `folder`, by adapter."""
    found = {} if not (folder / ADAPTERS_FILE).exists() else {"default": ADAPTERS_FILE}
    return found | {
        path.parent.name: f"{path.parent.name}/{ADAPTERS_FILE}" for path in sorted(folder.glob(f"*/{ADAPTERS_FILE}"))
    }


def changes_only(model: nn.Module, state: Mapping[str, Any], written: Collection[tuple[str, str]]) -> bool:
    """Whether `written`, the adapters and names in files, are known, and all that training changes is among them.

    That is every trainable parameter, and every buffer that is kept, such as BatchNorm's statistics: they move in a frozen
    model too.
    """
    names = adapter_keys(model, state)
    if not written or any(name not in names for name in written):
        return False
    held = {_place(state[names[name]]) for name in written}
    frozen = {_place(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    return all(_place(value) in held | frozen for value in state.values())


def adapter_keys(model: nn.Module, state: Mapping[str, Any], *, with_embeddings: bool = True) -> Names:
    """Where the tensors of all adapters of `model` stand in its `state`, its state_dict.

    PEFT writes whole embeddings too where it finds that they were changed; they are left out without `with_embeddings`.
    """
    from peft import get_peft_model_state_dict  # it is there, as a model of it is

    keys = {id(value): key for key, value in state.items()}
    with_embeddings = with_embeddings and hasattr(model, "get_input_embeddings")
    names: Names = {}
    configs: Mapping[str, Any] = model.peft_config  # type: ignore[assignment]
    for adapter, config in configs.items():
        if config.is_prompt_learning:  # PEFT writes what the prompts come to, which for some kinds is what is trained
            prompts = f"prompt_encoder.{adapter}.embedding.weight"
            names |= {(adapter, "prompt_embeddings"): prompts} if prompts in state else {}
            continue
        given = get_peft_model_state_dict(model, dict(state), adapter, save_embedding_layers=with_embeddings)
        names |= {(adapter, name): keys[id(value)] for name, value in given.items() if id(value) in keys}
    return names


def _place(value: Any) -> Any:
    return (value.device, value.data_ptr(), value.shape) if isinstance(value, Tensor) else id(value)
