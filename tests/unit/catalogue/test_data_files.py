"""Any damage of the JSON files of the package is one error with a remedy."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trl_hotfix.catalogue import condensed, data_files, evidence_file, loading, on_record
from trl_hotfix.errors import DamagedError
from trl_hotfix.matching import fingerprints

PATCH = loading.load()[0]
TARGET = PATCH.targets[0].name
BODIES = {"releases": ["0.11.4"], "targets": {TARGET: {"c1:0": {"releases": ["0.11.4"], "is": {PATCH.id: "buggy"}}}}}
PROVEN = {PATCH.id: {"revision": PATCH.revision, "releases": ["0.11.4"]}}
PROOF = {
    "release": "0.11.4",
    "stack": "tf4.44",
    "verdict": "proven",
    "runs": {},
}
PARITY = {
    "release": "0.11.4",
    "stack": "tf4.44",
    "fixed_release": "0.12.0",
    "loss_difference": 0.0,
    "gradient_difference": 0.0,
}
RESULT = {"verdict": "proven", "runs": {}, "places": {"tf4.44": ["0.11.4"]}}
EVIDENCE = {"revision": PATCH.revision, "results": [RESULT], "parity": [PARITY]}
FILES = {
    "data/fingerprints.json": BODIES,
    "data/proven.json": PROVEN,
    "data/trainings.json": {PATCH.id: EVIDENCE},
}
RECORD: dict[str, Any] = {
    "patch": PATCH.id,
    "revision": PATCH.revision,
    "releases": ["0.11.4"],
    "proven": ["0.11.4"],
    "bodies": {TARGET: {"c1:0": {"releases": ["0.11.4"], "is": "buggy"}}},
    "inherited": {},
}
CELL = {**PROOF, "ran": "0.11.4", "why": "", "key": "0", "leaves": {}, "bodies": {TARGET: "c1:0"}}
ANSWERS = {"cells": [CELL], "beneath": [], "proofs": [{**CELL, "runs": {}}], "parity": [{**PARITY, "gradients": 98}]}
WRITTEN = evidence_file.text({**RECORD, **ANSWERS, "curve": None, "mutants": None})


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, list[bytes]], Any]:
    def read_contents(folder: Path, contents: list[bytes]) -> Any:
        """Read the files, past the caches of the process."""
        for name, content in zip(FILES, contents, strict=True):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        with monkeypatch.context() as context:
            context.setattr(data_files, "PACKAGE", folder)
            context.setattr(on_record, "proven", on_record.proven.__wrapped__)
            context.setattr(on_record, "trainings", on_record.trainings.__wrapped__)
            context.setattr(on_record, "_all_trainings", on_record._all_trainings.__wrapped__)
            verdict = fingerprints.bodies.__wrapped__().verdict(PATCH.id, TARGET, "c1:0")
            on_record.proofs_of(PATCH), on_record.parity_of(PATCH)
            return verdict, on_record.in_words(PATCH)

    return read_contents


def test_undamaged_files_are_read(read: Any, tmp_path: Path) -> None:
    contents = [json.dumps(right).encode() for right in FILES.values()]
    assert read(tmp_path, contents) == ("buggy", "proven on 0.11.4")


@pytest.mark.parametrize(
    "wrong", [b"", b"[" * 100_000, b"null", b"\xff", b'{"cells": 3, "releases": [], "targets": 3}']
)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_with_a_remedy(wrong: bytes, name: str, read: Any, tmp_path: Path) -> None:
    contents = [wrong if file == name else json.dumps(right).encode() for file, right in FILES.items()]
    with pytest.raises(DamagedError, match="install trl_hotfix again") as caught:
        read(tmp_path, contents)
    assert name in str(caught.value)


def test_the_evidence_is_condensed_to_the_files_of_the_package() -> None:
    files = condensed.condensed([RECORD])
    assert files == {"fingerprints.json": BODIES, "proven.json": PROVEN}


def test_the_trainings_are_condensed_to_what_is_shown_of_them() -> None:
    assert condensed.files([{**RECORD, **ANSWERS}]) == {
        "fingerprints.json": BODIES,
        "proven.json": PROVEN,
        "trainings.json": {PATCH.id: EVIDENCE},
    }


def test_each_result_of_a_patch_is_there_once_and_each_proof_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: Any = {"red": {"verdict": "reproduced", "measured": 1.0}, "green": {"verdict": "fixed", "why": "x"}}
    proofs = [{**PROOF, "release": release, "runs": runs} for release in ("0.11.3", "0.11.4")]
    proofs.append({**PROOF, "stack": "tf4.46", "release": "0.11.4", "runs": runs})
    # Equal numbers in another order are another result: `explain` shows them in theirs.
    proofs.append({**PROOF, "release": "0.12.0", "runs": dict(reversed(runs.items()))})
    trainings = condensed.trainings([{**RECORD, "proofs": proofs, "parity": [PARITY]}])
    results = trainings[PATCH.id]["results"]
    assert [result["places"] for result in results] == [
        {"tf4.44": ["0.11.3", "0.11.4"], "tf4.46": ["0.11.4"]},
        {"tf4.44": ["0.12.0"]},
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "trainings.json").write_text(json.dumps(trainings))
    monkeypatch.setattr(data_files, "PACKAGE", tmp_path)
    read = on_record._all_trainings.__wrapped__()[PATCH.id]
    assert json.dumps(read) == json.dumps({"revision": PATCH.revision, "proofs": proofs, "parity": [PARITY]})


def test_patches_on_one_target_share_its_bodies() -> None:
    other = {
        **RECORD,
        "patch": "another-patch",
        "releases": ["0.9.6", "0.11.4"],
        "bodies": {
            TARGET: {"c1:0": {"releases": ["0.9.6", "0.11.4"]}, "c1:1": {"releases": ["0.12.0"], "is": "fixed"}}
        },
    }
    files = condensed.condensed([RECORD, other])
    assert files["fingerprints.json"] == {
        "releases": ["0.9.6", "0.11.4"],
        "targets": {
            TARGET: {
                "c1:0": {"releases": ["0.9.6", "0.11.4"], "is": {PATCH.id: "buggy"}},
                "c1:1": {"releases": ["0.12.0"], "is": {"another-patch": "fixed"}},
            }
        },
    }


def test_patches_on_one_inherited_method_share_its_bodies() -> None:
    of, name = "transformers:Trainer.training_step", "trl.trainer.x:XTrainer.training_step"
    records = [
        {**RECORD, "inherited": {name: {"of": of, "by": ["0.11.4"], "is": {"c1:0": "buggy"}}}},
        {**RECORD, "patch": "another-patch", "inherited": {name: {"of": of, "by": ["0.9.6"], "is": {"c1:1": "fixed"}}}},
    ]
    condensed_files = condensed.condensed(records)
    verdicts = {"c1:0": {PATCH.id: "buggy"}, "c1:1": {"another-patch": "fixed"}}
    assert condensed_files["fingerprints.json"]["inherited"] == {
        name: {"of": of, "by": ["0.9.6", "0.11.4"], "is": verdicts}
    }


@pytest.fixture
def checkout_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Any, Any, Any]]:
    (tmp_path / "evidence").mkdir()
    for marker in ("pyproject.toml", "patches.yaml"):
        (tmp_path / marker).touch()
    monkeypatch.setattr(data_files, "PACKAGE", tmp_path / "trl_hotfix")
    monkeypatch.setattr(data_files, "_condensed", data_files._condensed.__wrapped__)

    def read_one_file(content: str) -> tuple[Any, Any, Any]:
        """Read a checkout that has this evidence alone."""
        (tmp_path / "evidence" / f"{PATCH.id}.json").write_text(content)
        proven = data_files.read_data("proven.json", dict[str, on_record.Proven])
        bodies = data_files.read_data("fingerprints.json", fingerprints.Bodies)
        return proven, bodies, on_record.trainings.__wrapped__(PATCH.id)

    return read_one_file


def test_the_evidence_of_a_checkout_is_read(checkout_of: Callable[[str], tuple[Any, Any, Any]]) -> None:
    proven, bodies, trainings = checkout_of(WRITTEN)
    assert proven == PROVEN
    assert bodies.verdict(PATCH.id, TARGET, "c1:0") == "buggy"
    assert [proof["verdict"] for proof in trainings["proofs"]] == ["proven"]


@pytest.mark.parametrize("wrong", ["", "null", '{"patch": 3}', WRITTEN.replace('"c1:0 buggy"', "3")])
def test_damaged_evidence_of_a_checkout_is_named(wrong: str, checkout_of: Callable[[str], Any]) -> None:
    with pytest.raises(DamagedError, match="install trl_hotfix again"):
        checkout_of(wrong)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) within a structure."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@st.composite
def damaged(draw: st.DrawFn) -> list[bytes]:
    """Draw the contents of the files, with a value replaced in each, and perhaps the end cut off."""
    contents = []
    for content in FILES.values():
        data = json.loads(json.dumps(content))
        container, key = draw(st.sampled_from(places(data)))
        container[key] = draw(json_values)
        text = json.dumps(data).encode()
        contents.append(text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text)
    return contents


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(contents=damaged() | st.lists(st.binary(max_size=30), min_size=len(FILES), max_size=len(FILES)))
def test_any_damage_is_read_or_is_one_error(contents: list[bytes], read: Any, tmp_path: Path) -> None:
    try:
        verdict, words = read(tmp_path, contents)
    except DamagedError:
        return
    assert verdict is None or isinstance(verdict, str)
    assert isinstance(words, str)


@st.composite
def damaged_evidence(draw: st.DrawFn) -> str:
    document = json.loads(WRITTEN)
    container, key = draw(st.sampled_from(places(document)))
    if draw(st.booleans()):
        container[key] = draw(json_values)
    else:
        del container[key]
    return json.dumps(document)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=damaged_evidence())
def test_any_damage_of_evidence_is_read_or_is_one_error(content: str, checkout_of: Callable[[str], Any]) -> None:
    with contextlib.suppress(DamagedError):
        checkout_of(content)
