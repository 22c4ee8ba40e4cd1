"""The manifest: what a checkpoint consists of. It is written last, so a folder that agrees with its manifest is whole.

    {
      "format_version": 1,
      "global_step": 20, "epoch": 0.5, "world_size": 2, "global_batch_size": 16,
      "created": "2026-01-31T12:00:00+00:00", "allstep_version": "0.1.0", "torch_version": "2.13.0",
      "files": {"model.safetensors": {"size": 123456, "sha256": "9f86…"}, …},
      "sha256": "60303a…"
    }

The last line is the digest of the manifest itself without that line: a flipped bit in the manifest is found as well.
Nothing in this module touches the disk.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from allstep.errors import CheckpointError

__all__ = ["FORMAT_VERSION", "MANIFEST_FILE", "FileEntry", "Manifest"]

FORMAT_VERSION = 1
"""Version of the manifest that this allstep writes, and the newest that it reads."""

MANIFEST_FILE = "manifest.json"
"""Name of the manifest inside a checkpoint folder."""

_FIELDS = {
    "global_step": int,
    "epoch": float,
    "world_size": int,
    "global_batch_size": int,
    "created": str,
    "allstep_version": str,
    "torch_version": str,
}


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint."""

    size: int
    """Length in bytes."""
    sha256: str
    """SHA-256 of the content, 64 hexadecimal digits."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a checkpoint says about itself."""

    global_step: int
    """Optimizer steps done when the checkpoint was taken."""
    epoch: float
    """Passes over the data done by then, with fraction."""
    world_size: int
    """Number of ranks that wrote the checkpoint."""
    global_batch_size: int
    """Samples in each optimizer step, over all ranks."""
    files: Mapping[str, FileEntry]
    """Every file but the manifest, by its path inside the folder, with `/` between parts."""
    created: str
    """When the manifest was written: ISO 8601, UTC."""
    allstep_version: str
    """The allstep that wrote the checkpoint."""
    torch_version: str
    """The torch that wrote the checkpoint."""
    job: str = ""
    """Name of the job that wrote the checkpoint, where its launcher gave it one."""
    format_version: int = FORMAT_VERSION
    """Version of this format."""

    def to_json(self) -> str:
        """The text of the manifest file."""
        content: dict[str, Any] = asdict(self) | {"files": {name: asdict(entry) for name, entry in self.files.items()}}
        return json.dumps(content | {"sha256": _digest(content)}, indent=2, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: the text is no manifest, was changed after it was written, is of a newer format, or names a file
                outside its folder.
        """
        try:
            content = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{MANIFEST_FILE} is not valid JSON: {error}.") from None
        if not isinstance(content, dict):
            raise CheckpointError(f"{MANIFEST_FILE} holds a JSON {type(content).__name__} where an object was expected.")
        version = content.get("format_version")
        if not isinstance(version, int):
            raise CheckpointError(f"{MANIFEST_FILE} has no format_version; it was not written by allstep.")
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{MANIFEST_FILE} has format_version {version}; this allstep reads up to {FORMAT_VERSION}. Read it with the "
                f"allstep that wrote it ({content.get('allstep_version')}), or a newer one."
            )
        found = content.pop("sha256", None)
        if found != _digest(content):
            raise CheckpointError(f"{MANIFEST_FILE} was changed after it was written: its own SHA-256 does not match.")
        values = {name: _typed(name, content.get(name), kind) for name, kind in _FIELDS.items()}
        job = _typed("job", content.get("job", ""), str)
        return cls(files=_entries(content.get("files")), job=job, format_version=version, **values)

    def problems(self, found: Mapping[str, FileEntry]) -> list[str]:
        """Compare with the files that were `found`; one sentence for each that is not as it was written.

        Files that the manifest does not list are no problem: people put notes and tokenizers beside a checkpoint.
        """
        sentences = []
        for name, expected in sorted(self.files.items()):
            entry = found.get(name)
            if entry is None:
                sentences.append(f"{name} is missing ({expected.size} bytes expected).")
            elif entry.size != expected.size:
                sentences.append(f"{name} has {entry.size} bytes, {expected.size} expected.")
            elif entry.sha256 != expected.sha256:
                sentences.append(
                    f"{name} was changed after it was written: SHA-256 {entry.sha256[:12]}… found, "
                    f"{expected.sha256[:12]}… expected."
                )
        return sentences


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _entries(files: Any) -> dict[str, FileEntry]:
    if not isinstance(files, dict):
        raise CheckpointError(f"{MANIFEST_FILE} lists no files.")
    entries = {}
    for name, entry in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise CheckpointError(f"{MANIFEST_FILE} names {name!r}, which lies outside the checkpoint's folder.")
        if not isinstance(entry, dict):
            raise CheckpointError(f"{MANIFEST_FILE} has no size and SHA-256 for {name}.")
        entries[name] = FileEntry(
            size=_typed(f"the size of {name}", entry.get("size"), int),
            sha256=_typed(f"the SHA-256 of {name}", entry.get("sha256"), str),
        )
    return entries


def _typed(what: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise CheckpointError(f"{MANIFEST_FILE} has {value!r} for {what}, where {kind.__name__} was expected.")
    return value
