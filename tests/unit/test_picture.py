from __future__ import annotations

import copy
import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NAMESPACE = "{http://www.w3.org/2000/svg}"


def loaded() -> ModuleType:
    path = Path(__file__).parents[1] / "bench" / "picture.py"
    spec = importlib.util.spec_from_file_location("picture", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up in sys.modules.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


picture = loaded()
CATALOGUE = [
    picture.Row(
        "dpo-twice", "DPO <twice> & more", "wrong-loss", ">=1.0,<1.2", ("https://github.com/huggingface/trl/1",)
    ),
    picture.Row("grpo-never", "GRPO never", "crash", ">=1.1", ()),
]


def cell(patch: str, release: str, verdict: str, stack: str = "tf4", **fields: Any) -> dict[str, Any]:
    run = {"verdict": "reproduced", "measured": 0.6931471805, "right": 1.5}
    return {
        "patch": patch,
        "revision": 1,
        "release": release,
        "stack": stack,
        "versions": {"python": "3.11.7", "transformers": "4.44.2"},
        "verdict": verdict,
        "why": "",
        "leaves": {"trl.trainer.dpo_trainer": {"red": run}},
        "bodies": {"trl.trainer.dpo_trainer:DPOTrainer.loss": "c1:0123456789abcdef"},
        "stale": False,
        **fields,
    }


@pytest.fixture
def evidence() -> dict[str, Any]:
    return {
        "trl_hotfix": "0.1.0",
        "releases": ["1.0.0", "1.1.0", "1.1.1"],
        "cells": [
            cell("dpo-twice", "1.0.0", "proven"),
            cell("dpo-twice", "1.1.0", "proven", "tf5"),
            cell("dpo-twice", "1.1.0", "unrepaired", "tf4", why="</script><b>&"),
            cell("dpo-twice", "1.1.1", "proven", stale=True),
            cell("grpo-never", "1.0.0", "absent"),
        ],
        "proofs": [
            {"patch": "dpo-twice", "release": "1.0.0", "stack": "tf4", "verdict": "proven", "why": "", "runs": {}},
            {"patch": "dpo-twice", "release": "1.1.0", "stack": "tf4", "verdict": "unrepaired", "why": "", "runs": {}},
        ],
        "parity": [
            {
                "patch": "dpo-twice",
                "release": "1.0.0",
                "fixed_release": "1.2.0",
                "loss_difference": 1e-8,
                "gradient_difference": 3e-9,
                "gradients": 25,
            }
        ],
    }


def uses(drawn: str) -> dict[str, list[str]]:
    """Return the symbols in each cell of an SVG, by the first line of its title."""
    groups = ElementTree.fromstring(drawn).iter(f"{NAMESPACE}g")
    titled = [(group.findtext(f"{NAMESPACE}title"), group) for group in groups]
    return {
        title.splitlines()[0]: [use.attrib["href"][1:] for use in group.iter(f"{NAMESPACE}use")]
        for title, group in titled
        if title
    }


def data(page: str) -> Any:
    script = re.search(r'<script type="application/json">(.*?)</script>', page)
    assert script
    return json.loads(script[1])


def test_each_cell_shows_its_verdict_and_its_marks(evidence: dict[str, Any]) -> None:
    drawn = uses(picture.svg(evidence, CATALOGUE))
    assert drawn["dpo-twice on TRL 1.0.0"] == ["proven-1", "proof", "parity"]
    assert drawn["dpo-twice on TRL 1.1.1"] == ["proven-stale-1"]
    assert drawn["grpo-never on TRL 1.0.0"] == ["absent-1"]


def test_two_stacks_are_drawn_and_the_worse_is_counted(evidence: dict[str, Any]) -> None:
    picture_of_it = picture.svg(evidence, CATALOGUE)
    assert uses(picture_of_it)["dpo-twice on TRL 1.1.0"] == ["unrepaired-2", "proven-2", "broken"]
    assert "1 failed, 2 unknown, 1 stale" in picture_of_it
    assert ">1 unrepaired<" in picture_of_it
    assert ">2 proven<" in picture_of_it


def test_a_cell_without_evidence_is_unknown(evidence: dict[str, Any]) -> None:
    assert uses(picture.svg(evidence, CATALOGUE))["grpo-never on TRL 1.1.0"] == ["unknown-1"]
    empty = {"trl_hotfix": "0.1.0", "releases": ["1.0.0"], "cells": []}
    assert ">0 proven<" in picture.svg(empty, CATALOGUE)
    assert "2 unknown" in picture.html(empty, CATALOGUE)


def test_an_unknown_verdict_is_an_error(evidence: dict[str, Any]) -> None:
    evidence["cells"] = [cell("dpo-twice", "1.0.0", "marvellous")]
    drawn = picture.svg(evidence, CATALOGUE)
    assert uses(drawn)["dpo-twice on TRL 1.0.0"][0] == "error-1"
    assert "&#x27;marvellous&#x27; is no verdict" in drawn


def test_evidence_for_an_unlisted_patch_is_drawn(evidence: dict[str, Any]) -> None:
    evidence["cells"].append(cell("gone", "9.9", "error"))
    assert uses(picture.svg(evidence, CATALOGUE))["gone on TRL 9.9"] == ["error-1"]
    assert data(picture.html(evidence, CATALOGUE))["rows"][-1][0] == "gone"


def test_the_numbers_are_in_the_title_and_the_panel(evidence: dict[str, Any]) -> None:
    numbers = "trl.trainer.dpo_trainer, red: reproduced, measured 0.693147, right 1.5"
    assert numbers in picture.svg(evidence, CATALOGUE)
    page_data = data(picture.html(evidence, CATALOGUE))
    first = [page_data["lines"][line] for line in page_data["cells"][0]]
    assert numbers in first
    assert "patch revision 1, with python 3.11.7, transformers 4.44.2" in first
    assert "body trl.trainer.dpo_trainer:DPOTrainer.loss = c1:0123456789abcdef" in first
    assert "compared with TRL 1.2.0: loss differs by 1e-08, 25 gradients by 3e-09 at most" in first
    assert len(page_data["cells"]) == 6


def test_stale_evidence_is_described_in_words(evidence: dict[str, Any]) -> None:
    assert f"tf4: proven, {picture.STALE}".replace("'", "&#x27;") in picture.svg(evidence, CATALOGUE)


def test_hostile_text_is_escaped(evidence: dict[str, Any]) -> None:
    evidence["cells"][0]["why"] = "\x1b[31m\x00\ud800 <svg onload=alert(1)>"
    page, drawn = picture.html(evidence, CATALOGUE), picture.svg(evidence, CATALOGUE)
    ElementTree.fromstring(drawn)
    page.encode()
    assert "<svg onload" not in page + drawn
    assert "</script><b>" not in page + drawn
    assert "DPO &lt;twice&gt; &amp; more" in page
    assert "DPO &lt;twice&gt; &amp; more" in drawn


def test_page_and_picture_load_nothing_else(evidence: dict[str, Any]) -> None:
    page, drawn = picture.html(evidence, CATALOGUE), picture.svg(evidence, CATALOGUE)
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page + drawn))
    assert addresses == {"http://www.w3.org/2000/svg", "https://github.com/huggingface/trl/1"}
    assert not re.search(r"\bsrc=|@import|<link|url\((?!#hatch)", page + drawn)
    assert "<script" not in drawn


def test_the_order_of_the_evidence_changes_no_byte(evidence: dict[str, Any]) -> None:
    shuffled = copy.deepcopy(evidence)
    shuffled["cells"].reverse()
    for draw in (picture.svg, picture.html):
        assert draw(evidence, CATALOGUE) == draw(copy.deepcopy(evidence), CATALOGUE) == draw(shuffled, CATALOGUE)


def test_sixty_patches_make_a_page_below_one_megabyte() -> None:
    releases = [f"1.{minor}.0" for minor in range(65)]
    rows = [picture.Row(f"dpo-loss-{number}", "", "crash", ">=1", ()) for number in range(60)]
    cells = [cell(row.id, release, "absent", stack) for row in rows for release in releases for stack in ("a", "b")]
    for number, row_cell in enumerate(cells):
        row_cell["leaves"]["trl.trainer.dpo_trainer"]["red"] = {"verdict": "absent", "measured": number / 1000}
    page = picture.html({"trl_hotfix": "0", "releases": releases, "cells": cells}, rows)
    assert len(page.encode()) < 1_000_000


def test_the_command_writes_both_files(
    evidence: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "matrix.json").write_text(json.dumps(evidence), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["picture.py", str(tmp_path / "matrix.json"), str(tmp_path / "out")])
    picture.main()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"matrix.svg", "matrix.html"}
