"""``check`` on scripts as people write them: what is wrong on purpose is found with its place, and nothing else is.

``tests/checked/scripts.yaml`` has what each script should get.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from trl_hotfix.checking import process
from trl_hotfix.checking.answers import VIOLATED, Answer

from bench.releases import layout
from helpers import check_materials

SCRIPTS = Path(__file__).parents[1] / "checked"
CASES: list[dict[str, Any]] = yaml.safe_load((SCRIPTS / "scripts.yaml").read_text(encoding="utf-8"))
RELEASES = ("1.16.0", "0.19.1")
CHECKOUT = Path(__file__).parents[2]


def cases() -> Iterator[Any]:
    for case in CASES:
        for release in case.get("releases", RELEASES):
            if SpecifierSet(case.get("trl", "")).contains(release):
                yield pytest.param(release, case, id=f"{release}-{case['script']}", marks=pytest.mark.matrix)


def test_each_script_has_an_expectation() -> None:
    assert sorted(path.name for path in SCRIPTS.glob("*.py")) == sorted(case["script"] for case in CASES)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    check_materials.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("release", "case"), list(cases()))
def test_script(folder: Path, release: str, case: dict[str, Any]) -> None:
    shutil.copy(SCRIPTS / case["script"], folder)
    place = layout.main_place(release)
    layout.build([place])
    task = {
        "script": str(folder / case["script"]),
        "arguments": case.get("arguments", []),
        "which": case.get("which", 1),
        "rows": {},
        "configs": {},
        "online": False,
        "dry_run": False,
        "log": None,
    }
    path = f"{CHECKOUT}:{place.overlay}"
    answer = process.checked(task, release, python=str(place.python), path=path)
    expected = case.get("error")
    assert (expected is None) == (answer["error"] is None), answer["error"]
    assert (expected or "") in (answer["error"] or "")
    assert wrong(answer) == set(case.get("wrong", []))
    assert all(case.get("place", "") in str(place) for place in places(answer))
    causes = {each["cause"] for each in answer["relations"] if each["part"] == "training" and each["cause"]}
    assert case.get("cause") is None or case["cause"] in causes
    noted = "\n".join(answer["noted"])
    assert all(text in noted for text in case.get("noted", []))


def wrong(answer: Answer) -> set[str]:
    """Return the relations that the user's own code violates, or for which nothing else is known."""
    unknown = [each for each in answer["relations"] if each["state"] == VIOLATED and each["cause"] is None]
    return {each["relation"] for each in unknown if each["part"] == "training" or each["whose"] != "TRL's"}


def places(answer: Answer) -> list[str | None]:
    return [each["place"] for each in answer["relations"] if each["whose"] == "yours"]
