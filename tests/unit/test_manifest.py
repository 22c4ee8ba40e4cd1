import json
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.checkpoint.manifest import FORMAT_VERSION, FileEntry, Manifest
from allstep.errors import CheckpointError

HEX = "0123456789abcdef"
NAMES = st.text(st.characters(exclude_characters="/\x00", exclude_categories=["Cs"]), min_size=1).filter(
    lambda name: name not in (".", "..")
)
ENTRIES = st.builds(FileEntry, size=st.integers(0, 2**50), sha256=st.text(HEX, min_size=64, max_size=64))
MANIFESTS = st.builds(
    Manifest,
    global_step=st.integers(0, 10**9),
    epoch=st.floats(0, 1e6, allow_nan=False),
    world_size=st.integers(1, 10**5),
    global_batch_size=st.integers(1, 10**7),
    files=st.dictionaries(NAMES, ENTRIES, max_size=5),
    created=st.text(st.characters(exclude_categories=["Cs"])),
    allstep_version=st.text(max_size=10).filter(str.isprintable),
    torch_version=st.just("2.13.0+cpu"),
)


def manifest(**changed: object) -> Manifest:
    entry = FileEntry(size=8, sha256="ab" * 32)
    whole = Manifest(
        global_step=20,
        epoch=0.5,
        world_size=2,
        global_batch_size=16,
        files={"model.safetensors": entry, "optimizer.pt": entry},
        created="2026-01-31T12:00:00+00:00",
        allstep_version="0.1.0",
        torch_version="2.13.0",
    )
    return replace(whole, **changed)


def signed(text: str, **changed: object) -> str:
    """The manifest's text with other content, signed as if allstep had written it."""
    from allstep.checkpoint import manifest as module

    content = json.loads(text) | changed
    content.pop("sha256")
    return json.dumps(content | {"sha256": module._digest(content)})


@given(MANIFESTS)
def test_a_manifest_comes_back_from_json_equal(written: Manifest) -> None:
    assert Manifest.from_json(written.to_json()) == written


@given(MANIFESTS, st.data())
def test_no_changed_character_goes_unseen(written: Manifest, data: st.DataObject) -> None:
    text = written.to_json()
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.characters(min_codepoint=33, max_codepoint=126)) + text[at + 1 :]
    try:
        read = Manifest.from_json(changed)
    except CheckpointError:
        return
    assert read == written, "a change that passes the digest must be no change of the content"


def test_a_manifest_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        manifest().global_step = 3  # type: ignore[misc]


def test_equal_files_are_no_problem_and_files_beside_them_neither() -> None:
    entry = FileEntry(size=8, sha256="ab" * 32)
    found = {"model.safetensors": entry, "optimizer.pt": entry, "notes.txt": FileEntry(size=1, sha256="00" * 32)}
    assert manifest().problems(found) == []


def test_each_problem_is_a_sentence_that_names_the_file() -> None:
    entry = FileEntry(size=8, sha256="ab" * 32)
    missing = manifest().problems({"model.safetensors": entry})
    assert missing == ["optimizer.pt is missing (8 bytes expected)."]
    short = manifest().problems({"model.safetensors": entry, "optimizer.pt": FileEntry(size=3, sha256="cd" * 32)})
    assert short == ["optimizer.pt has 3 bytes, 8 expected."]
    changed = manifest().problems({"model.safetensors": FileEntry(size=8, sha256="cd" * 32), "optimizer.pt": entry})
    assert changed == [
        "model.safetensors was changed after it was written: SHA-256 cdcdcdcdcdcd… found, abababababab… expected."
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not valid JSON"),
        ('{"global_step": 20', "not valid JSON"),
        ("[]", "JSON list"),
        ("{}", "not written by allstep"),
        (signed(manifest().to_json(), format_version=FORMAT_VERSION + 1), f"reads up to {FORMAT_VERSION}"),
        (manifest().to_json().replace('"global_step": 20', '"global_step": 21'), "changed after it was written"),
        (signed(manifest().to_json(), global_step="20"), "'20' for global_step, where int"),
        (signed(manifest().to_json(), world_size=True), "True for world_size"),
        (signed(manifest().to_json(), files=None), "lists no files"),
        (signed(manifest().to_json(), files={"a": 3}), "no size and SHA-256 for a"),
        (signed(manifest().to_json(), files={"../../etc/passwd": {"size": 1, "sha256": "00"}}), "outside the checkpoint"),
        (signed(manifest().to_json(), files={"/etc/passwd": {"size": 1, "sha256": "00"}}), "outside the checkpoint"),
    ],
)
def test_what_is_no_manifest_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        Manifest.from_json(text)


def test_a_manifest_without_a_finite_epoch_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        manifest(epoch=float("nan")).to_json()
