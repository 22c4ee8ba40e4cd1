"""Checkpoint folders on disk: staged aside, made durable, brought in by one rename. Knows nothing of ranks or tensors.

Below an output folder lie

    checkpoint-20/                      whole, or damaged after it was written
    staging-checkpoint-40/              being written; debris once its run is gone
    staging-replaced-checkpoint-20/     the old checkpoint-20, for a moment, where two folders cannot change places in one call
    staging-removed-checkpoint-10/      being deleted

Whoever is killed anywhere in here leaves only debris behind, never a checkpoint-N that is half there
(test_checkpoint_kill.py).
"""

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from allstep.checkpoint.holds import held_for_deletion
from allstep.checkpoint.manifest import MANIFEST_FILE, FileEntry, Manifest
from allstep.checkpoint.reasons import reason
from allstep.errors import CheckpointError

__all__ = ["CheckpointStore", "Hook", "WriteFiles", "checkpoint_name", "step_of"]

Hook = Callable[[str, Path], None]
"""Called before each action on disk with the action's name and the path it acts on. A test raises in it, or dies."""

WriteFiles = Callable[[Path], list[str]]
"""Writes one or more files into a folder and returns their names, relative to that folder."""

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_DEBRIS = re.compile(r"staging-((replaced-|removed-)?checkpoint-\d+|export)")
_STAGING, _REPLACED, _REMOVED = "staging-", "staging-replaced-", "staging-removed-"
_EXPORT = "staging-export"
_CHUNK = 1 << 20
"""Bytes read at a time while a file is hashed."""


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint taken after `step` optimizer steps."""
    return f"checkpoint-{step}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint's folder name; None for any other name."""
    match = _CHECKPOINT.fullmatch(folder.name)
    return int(match.group(1)) if match else None


class CheckpointStore:
    """The checkpoints below one output folder. One process writes; `write` may be called by others, on other files.

    A save is: `stage`, `write` for each file, `commit`. If anything fails in between: `discard`.
    """

    def __init__(self, output_dir: Path, hook: Hook = lambda action, path: None) -> None:
        self.output_dir = output_dir
        """Where the checkpoints lie."""
        self._hook = hook

    def checkpoints(self) -> list[Path]:
        """Folders named `checkpoint-N`, by N, oldest first. Whether they are whole is for `problems` to say."""
        found = [(step, path) for path in self._folders() if (step := step_of(path)) is not None]
        return [path for _, path in sorted(found)]

    def stage(self, step: int) -> Path:
        """An empty folder to write the files of `checkpoint-{step}` into."""
        return self._fresh(self.output_dir / f"{_STAGING}{checkpoint_name(step)}")

    def write(self, staging: Path, label: str, write: WriteFiles) -> dict[str, FileEntry]:
        """Let `write` put files into `staging`; they are on the disk, not only in its cache, when this returns.

        Raises:
            CheckpointError: names `label`, the folder and the reason, whatever `write` raised.
        """
        try:
            self._hook("write", staging / label)
            return {name: self._seal(staging / name) for name in write(staging)}
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{label} could not be written to {staging}: {reason(error)}.") from error

    def commit(self, staging: Path, manifest: Manifest) -> Path:
        """Turn a staging folder into the checkpoint of `manifest.global_step`, replacing one that is there; its path.

        The staging folder is gone afterwards, whatever happens.

        Raises:
            CheckpointError: names the file, the folder and the reason. A checkpoint that was there is there still.
        """
        target = self.output_dir / checkpoint_name(manifest.global_step)
        try:
            self._hook("write", staging / MANIFEST_FILE)
            (staging / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
            self._seal(staging / MANIFEST_FILE)
            for folder in (*(path for path in staging.rglob("*") if path.is_dir()), staging):
                self._sync_folder(folder)
            if target.exists():
                self._replace(staging, target)
            else:
                self._rename(staging, target)
            self._sync_folder(self.output_dir)
        except BaseException as error:
            self.leave(staging)
            if isinstance(error, OSError):
                where = f"{target.name} could not be brought into {self.output_dir}"
                raise CheckpointError(f"{where}: {reason(error)}.") from error
            raise
        return target

    def discard(self, staging: Path) -> None:
        """Delete a staging folder. Does nothing where there is none."""
        if staging.exists():
            self._hook("discard", staging)
            shutil.rmtree(staging)

    def leave(self, staging: Path) -> None:
        """Delete a staging folder if that can be done: what is left of it is debris, which the next start deletes."""
        with contextlib.suppress(OSError):
            self.discard(staging)

    def remove(self, checkpoint: Path) -> bool:
        """Delete a checkpoint, unless another process reads it; whether it is gone.

        It leaves its name at once: a half deleted folder never passes for a damaged checkpoint.
        """
        leaving = self.output_dir / f"{_REMOVED}{checkpoint.name}"
        with held_for_deletion(checkpoint) as nobody_reads:
            if nobody_reads:
                self.discard(leaving)
                self._rename(checkpoint, leaving)
                self.discard(leaving)
        return nobody_reads

    def export(self, folder: Path, files: Mapping[str, WriteFiles]) -> list[str]:
        """Write `files`, by label, straight into `folder`, each of them whole or not at all; their names.

        Raises:
            CheckpointError: names the file, the folder and the reason. What was in the folder before is there still.
        """
        label = next(iter(files), "nothing")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            staging = self._fresh(folder / _EXPORT)
            try:
                names = [name for label, write in files.items() for name in self.write(staging, label, write)]
                for name in names:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    self._rename(staging / name, folder / name)
                for written in sorted({(folder / name).parent for name in names} | {folder}, reverse=True):
                    self._sync_folder(written)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        except OSError as error:
            raise CheckpointError(f"{label} could not be written to {folder}: {reason(error)}.") from error
        return names

    def clean(self) -> list[Path]:
        """Delete what killed runs left half-written, and bring back what they left aside; the paths that were deleted."""
        self.recover()
        debris = [path for path in self._folders() if _DEBRIS.fullmatch(path.name)]
        for path in debris:
            self.discard(path)
        return debris

    def recover(self) -> None:
        """Bring back a checkpoint that a run put aside to replace it, and then was killed."""
        for path in self._folders():
            target = self.output_dir / path.name.removeprefix(_REPLACED)
            if path.name.startswith(_REPLACED) and not target.exists():
                self._rename(path, target)

    def manifest(self, checkpoint: Path) -> Manifest | None:
        """The manifest in a checkpoint's folder; None where it has none.

        Raises:
            CheckpointError: there is one, and it is damaged.
        """
        try:
            return Manifest.from_json((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{MANIFEST_FILE} cannot be read: {reason(error)}.") from error

    def problems(self, checkpoint: Path) -> list[str]:
        """Read every file of a checkpoint and compare it with the manifest; a sentence a problem, none if it is whole."""
        try:
            manifest = self.manifest(checkpoint)
        except CheckpointError as error:
            return [str(error)]
        if manifest is None:
            return [f"{MANIFEST_FILE} is missing."]
        found, sentences = {}, []
        if step_of(checkpoint) not in (None, manifest.global_step):
            sentences.append(f"{MANIFEST_FILE} is that of step {manifest.global_step}.")
        for name in manifest.files:
            try:
                found[name] = describe(checkpoint / name)
            except FileNotFoundError:
                continue
            except OSError as error:
                found[name] = manifest.files[name]  # not missing: one sentence a file
                sentences.append(f"{name} cannot be read: {reason(error)}.")
        return sentences + manifest.problems(found)

    def _folders(self) -> list[Path]:
        if not self.output_dir.is_dir():
            return []
        return sorted(path for path in self.output_dir.iterdir() if path.is_dir() and not path.is_symlink())

    def _fresh(self, folder: Path) -> Path:
        try:
            self.discard(folder)
            self._hook("stage", folder)
            folder.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{folder} could not be made: {reason(error)}.") from error
        return folder

    def _seal(self, path: Path) -> FileEntry:
        self._hook("sync", path)
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors keeps from others what the umask lets them read
        _sync(path)
        return describe(path)

    def _sync_folder(self, folder: Path) -> None:
        self._hook("sync folder", folder)
        _sync(folder)

    def _rename(self, source: Path, target: Path) -> None:
        self._hook("rename", target)
        source.rename(target)

    def _replace(self, staging: Path, target: Path) -> None:
        """Bring `staging` in where a checkpoint lies: by one call where the file system can, else by two renames."""
        self._hook("exchange", target)
        if _exchange(staging, target):
            self._sync_folder(self.output_dir)
            self.leave(staging)  # by now the old one
            return
        aside = self.output_dir / f"{_REPLACED}{target.name}"
        self.discard(aside)
        self._rename(target, aside)
        try:
            self._rename(staging, target)
        except BaseException:
            aside.rename(target)
            raise
        self._sync_folder(self.output_dir)
        self.leave(aside)


def describe(path: Path) -> FileEntry:
    """Length and SHA-256 of a file, as read back from it."""
    sha, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            sha.update(chunk)
            size += len(chunk)
    return FileEntry(size=size, sha256=sha.hexdigest())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places, in one call that nobody can see half done; False where that is not to be had."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    at_cwd, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of linux/fs.h
    if call(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EXDEV):  # this kernel, or this file system, cannot
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
