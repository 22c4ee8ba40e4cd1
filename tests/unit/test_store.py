import errno
import os
import threading
from pathlib import Path

import pytest

from allstep.checkpoint import store as module
from allstep.checkpoint.manifest import FileEntry, Manifest
from allstep.checkpoint.store import CheckpointStore, checkpoint_name, describe, step_of
from allstep.errors import CheckpointError


def writes(name: str, text: str) -> module.WriteFiles:
    def write(folder: Path) -> list[str]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        return [name]

    return write


def manifest(step: int, files: dict[str, FileEntry]) -> Manifest:
    return Manifest(
        global_step=step,
        epoch=1.0,
        world_size=1,
        global_batch_size=8,
        files=files,
        created="",
        allstep_version="",
        torch_version="",
    )


def save(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    staging = store.stage(step)
    files = store.write(staging, "a.bin", writes("a.bin", text)) | store.write(staging, "b", writes("deep/b.bin", text))
    return store.commit(staging, manifest(step, files))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_checkpoint_is_whole_and_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 20)
    assert path == tmp_path / "checkpoint-20"
    assert store.problems(path) == []
    assert names(tmp_path) == ["checkpoint-20"]
    kept = store.manifest(path)
    assert kept is not None
    assert set(kept.files) == {"a.bin", "deep/b.bin"}


def test_nothing_being_written_is_named_like_a_checkpoint(tmp_path: Path) -> None:
    seen: list[tuple[str, list[str]]] = []
    save(CheckpointStore(tmp_path, hook=lambda action, path: seen.append((action, names(tmp_path)))), 20)
    before = seen[: [action for action, _ in seen].index("rename") + 1]
    assert [there for _, there in before] == [[], *[["staging-checkpoint-20"]] * (len(before) - 1)]
    assert step_of(Path("staging-checkpoint-20")) is None


def test_files_are_on_the_disk_before_the_manifest_and_all_before_the_rename(tmp_path: Path) -> None:
    did: list[tuple[str, str]] = []
    save(CheckpointStore(tmp_path, hook=lambda action, path: did.append((action, path.name))), 20)
    assert did == [
        ("stage", "staging-checkpoint-20"),
        ("write", "a.bin"),
        ("sync", "a.bin"),
        ("write", "b"),
        ("sync", "b.bin"),
        ("write", "manifest.json"),
        ("sync", "manifest.json"),
        ("sync folder", "deep"),
        ("sync folder", "staging-checkpoint-20"),
        ("rename", "checkpoint-20"),
        ("sync folder", tmp_path.name),
    ]


def test_every_file_and_folder_is_flushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        flushed.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save(CheckpointStore(tmp_path), 20)
    staging = "staging-checkpoint-20"
    files = [f"{staging}/a.bin", f"{staging}/deep/b.bin", f"{staging}/manifest.json"]
    assert flushed == [*files, f"{staging}/deep", staging, "."]


def test_a_commit_that_fails_leaves_no_staging_folder(tmp_path: Path) -> None:
    def hook(action: str, path: Path) -> None:
        if action == "rename":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(CheckpointError, match=r"checkpoint-20 could not be brought into .*: Input/output error\."):
        save(CheckpointStore(tmp_path, hook), 20)
    assert names(tmp_path) == []


def test_checkpoints_are_ordered_by_number_not_by_spelling(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for name in ("checkpoint-100", "checkpoint-9", "checkpoint-20", "checkpoint-x", "staging-checkpoint-7", "checkpoint-3-old"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-5").write_text("a file")
    assert [path.name for path in store.checkpoints()] == ["checkpoint-9", "checkpoint-20", "checkpoint-100"]
    assert CheckpointStore(tmp_path / "nowhere").checkpoints() == []


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_second_save_of_a_step_replaces_the_first(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    store = CheckpointStore(tmp_path)
    save(store, 20, "old")
    path = save(store, 20, "new")
    assert (path / "a.bin").read_text() == "new"
    assert store.problems(path) == []
    assert names(tmp_path) == ["checkpoint-20"]


def test_while_a_checkpoint_is_replaced_there_is_always_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 20)
    watching, done, looks, gaps = threading.Event(), threading.Event(), 0, 0

    def watch() -> None:
        nonlocal looks, gaps
        while not done.is_set():
            looks, gaps = looks + 1, gaps + (not os.path.exists(path / "manifest.json"))
            watching.set()

    if not module._exchange(save(store, 1), save(store, 2)):
        pytest.skip("this file system cannot let two folders change places in one call")
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert watching.wait(30)
        for _ in range(30):
            save(store, 20)
    finally:
        done.set()
        watcher.join()
    assert looks > 30
    assert gaps == 0


def test_where_folders_cannot_change_places_a_kill_between_the_renames_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    save(CheckpointStore(tmp_path), 20, "old")
    (tmp_path / "checkpoint-20").rename(tmp_path / "staging-replaced-checkpoint-20")
    store = CheckpointStore(tmp_path)
    assert store.clean() == []
    assert store.problems(tmp_path / "checkpoint-20") == []
    assert names(tmp_path) == ["checkpoint-20"]


def test_an_exchange_that_fails_for_another_reason_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(OSError, match="No such file") as caught:
        module._exchange(tmp_path / "one", tmp_path / "none")
    assert caught.value.errno == errno.ENOENT


def test_cleaning_removes_debris_and_nothing_else(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 20)
    debris = ["staging-checkpoint-40", "staging-removed-checkpoint-10", "staging-replaced-checkpoint-20", "staging-export"]
    for name in debris:
        (tmp_path / name).mkdir()
        (tmp_path / name / "half.bin").write_text("x")
    kept = ["staging-area", "runs", "staging-checkpoint-x"]
    for name in kept:
        (tmp_path / name).mkdir()
    assert sorted(path.name for path in store.clean()) == sorted(debris)
    assert names(tmp_path) == sorted([*kept, "checkpoint-20"])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "a.bin").unlink(), ["a.bin is missing (7 bytes expected)."]),
        (lambda folder: (folder / "a.bin").write_text("weig"), ["a.bin has 4 bytes, 7 expected."]),
        (lambda folder: (folder / "deep" / "b.bin").write_text("weighty"), ["deep/b.bin was changed after it was written"]),
        (lambda folder: (folder / "manifest.json").unlink(), ["manifest.json is missing."]),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"), ["manifest.json cannot be read"]),
        (lambda folder: (folder / "manifest.json").write_text("{}"), ["manifest.json has no format_version"]),
        (
            lambda folder: ((folder / "a.bin").unlink(), (folder / "a.bin").mkdir()),
            ["a.bin cannot be read: Is a directory."],
        ),
        (
            lambda folder: ((folder / "a.bin").write_text("x"), (folder / "deep" / "b.bin").unlink()),
            ["a.bin has 1 bytes", "deep/b.bin is missing"],
        ),
    ],
)
def test_damage_is_found_and_the_file_named(damage: object, said: list[str], tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 20)
    damage(path)  # type: ignore[operator]
    problems = store.problems(path)
    assert len(problems) == len(said)
    assert all(problem.startswith(start) for problem, start in zip(problems, said, strict=True)), problems


def test_a_checkpoint_under_another_steps_name_is_not_taken_for_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 20).rename(tmp_path / "checkpoint-30")
    assert store.problems(path) == ["manifest.json is that of step 20."]
    assert store.problems(path.rename(tmp_path / "best")) == [], "any other name promises no step"


def test_removing_takes_the_name_away_first(tmp_path: Path) -> None:
    did: list[tuple[str, str]] = []
    store = CheckpointStore(tmp_path)
    path = save(store, 20)
    CheckpointStore(tmp_path, hook=lambda action, path: did.append((action, path.name))).remove(path)
    assert did == [("rename", "staging-removed-checkpoint-20"), ("discard", "staging-removed-checkpoint-20")]
    assert names(tmp_path) == []


def test_the_operating_systems_reason_is_told_through_every_wrapper(tmp_path: Path) -> None:
    def write(folder: Path) -> list[str]:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("unexpected pos 640 vs 534")  # noqa: B904 - as torch does it

    store = CheckpointStore(tmp_path)
    staging = store.stage(20)
    with pytest.raises(CheckpointError) as caught:
        store.write(staging, "optimizer.pt", write)
    assert str(caught.value) == f"optimizer.pt could not be written to {staging}: No space left on device."


def test_an_export_replaces_files_one_by_one_and_leaves_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"
    store = CheckpointStore(tmp_path)
    store.export(folder, {"a.bin": writes("a.bin", "old")})
    (folder / "notes.txt").write_text("mine")
    assert store.export(folder, {"a.bin": writes("a.bin", "new"), "c": writes("sub/c.bin", "c")}) == ["a.bin", "sub/c.bin"]
    assert (folder / "a.bin").read_text() == "new"
    assert names(folder) == ["a.bin", "notes.txt", "sub"]


def test_an_export_is_on_the_disk_folders_included(tmp_path: Path) -> None:
    did: list[tuple[str, str]] = []
    store = CheckpointStore(tmp_path, hook=lambda action, path: did.append((action, path.name)))
    store.export(tmp_path / "model", {"c": writes("sub/c.bin", "c")})
    assert did[-3:] == [("rename", "c.bin"), ("sync folder", "sub"), ("sync folder", "model")]


def test_a_failing_export_leaves_what_was_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.export(tmp_path, {"a.bin": writes("a.bin", "old")})

    def fails(folder: Path) -> list[str]:
        (folder / "a.bin").write_text("ne")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"a\.bin could not be written .* No space left on device"):
        store.export(tmp_path, {"a.bin": fails})
    assert (tmp_path / "a.bin").read_text() == "old"
    assert names(tmp_path) == ["a.bin"]


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    (tmp_path / "none").write_bytes(b"")
    assert describe(tmp_path / "abc") == FileEntry(
        size=3, sha256="ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert describe(tmp_path / "none").size == 0
    assert checkpoint_name(7) == "checkpoint-7"


def test_files_can_be_read_by_whom_the_folder_lets(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    staging = store.stage(4)

    def private(folder: Path) -> list[str]:
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "model.safetensors").chmod(0o600)
        return ["model.safetensors"]

    store.write(staging, "model", private)
    assert (staging / "model.safetensors").stat().st_mode & 0o777 == staging.stat().st_mode & 0o666
