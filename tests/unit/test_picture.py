"""The page of the evidence, ``picture.html``, and the picture in the README, ``summary.summary_svg``."""

from __future__ import annotations

import copy
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import trl_hotfix
from trl_hotfix.catalogue import loading

CHECKOUT = Path(__file__).parents[2]
sys.path.insert(0, str(CHECKOUT / "tests" / "bench"))
matrix, picture, summary = (import_module(name) for name in ("matrix", "picture", "summary"))

NAMESPACE = "{http://www.w3.org/2000/svg}"
CATALOGUE = [
    matrix.Row(
        "dpo-twice",
        "DPO <twice> & more",
        "wrong-loss",
        ">=1.0,<1.2",
        ("https://github.com/huggingface/trl/1",),
        (("DPO", ">=1.0,<1.2"), ("KTO", ">=1.1,<1.2")),
    ),
    matrix.Row("grpo-never", "GRPO never", "crash", ">=1.1", (), (("GRPO", ">=1.1"),)),
]


def cell(patch: str, release: str, verdict: str, stack: str = "tf4", **fields: Any) -> dict[str, Any]:
    run = {"verdict": "reproduced", "measured": 0.6931471805, "right": 1.5}
    return {
        "patch": patch,
        "release": release,
        "stack": stack,
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


def symbols(page: str) -> dict[str, list[str]]:
    """Return the symbols in each cell of a page, by patch and release."""
    page_data = data(page)
    cells = [re.findall(r'href="#([^"]+)"', drawn) for drawn in re.findall(r"<td [^>]*><svg>(.*?)</svg></td>", page)]
    names = [f"{row[0]} on TRL {release}" for row in page_data["rows"] for release in page_data["releases"]]
    return dict(zip(names, cells, strict=True))


def data(page: str) -> Any:
    script = re.search(r'<script type="application/json">(.*?)</script>', page)
    assert script
    return json.loads(script[1])


def in_words(page: str, patch: str, release: str) -> list[str]:
    """Return the lines that the panel shows of a cell."""
    page_data = data(page)
    row = [row[0] for row in page_data["rows"]].index(patch)
    column = page_data["releases"].index(release)
    cell = page_data["cells"][row * len(page_data["releases"]) + column]
    return [page_data["lines"][line] for line in cell]


def table(drawn: str) -> dict[str, dict[str, str]]:
    """Return what the cells of the README's picture show, by the label of the line and the column."""
    shown: dict[str, dict[str, str]] = {}
    for group in ElementTree.fromstring(drawn).iter(f"{NAMESPACE}g"):
        place = (group.findtext(f"{NAMESPACE}title") or "").partition(": ")[0]
        line, column = place.removeprefix("TRL ").split(", ")
        shown.setdefault(line, {})[column] = group.findtext(f"{NAMESPACE}text") or ""
    return shown


def texts(drawn: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(drawn).iter(f"{NAMESPACE}text")]


# The page


def test_each_cell_shows_its_verdict_and_its_marks(evidence: dict[str, Any]) -> None:
    drawn = symbols(picture.html(evidence, CATALOGUE))
    assert drawn["dpo-twice on TRL 1.0.0"] == ["proven-1", "proof", "parity"]
    assert drawn["dpo-twice on TRL 1.1.1"] == ["proven-stale-1"]
    assert drawn["grpo-never on TRL 1.0.0"] == ["absent-1"]


def test_two_stacks_are_drawn_and_the_worse_is_counted(evidence: dict[str, Any]) -> None:
    page = picture.html(evidence, CATALOGUE)
    assert symbols(page)["dpo-twice on TRL 1.1.0"] == ["unrepaired-2", "proven-2", "broken"]
    assert "1 failed, 2 unknown, 1 stale" in page
    assert ">1 unrepaired<" in page
    assert ">2 proven<" in page


def test_a_cell_without_evidence_is_unknown(evidence: dict[str, Any]) -> None:
    assert symbols(picture.html(evidence, CATALOGUE))["grpo-never on TRL 1.1.0"] == ["unknown-1"]
    page = picture.html({"trl_hotfix": "0.1.0", "releases": ["1.0.0"], "cells": []}, CATALOGUE)
    assert ">0 proven<" in page
    assert "2 unknown" in page


def test_an_unknown_verdict_is_an_error(evidence: dict[str, Any]) -> None:
    evidence["cells"] = [cell("dpo-twice", "1.0.0", "marvellous")]
    page = picture.html(evidence, CATALOGUE)
    assert symbols(page)["dpo-twice on TRL 1.0.0"][0] == "error-1"
    assert "tf4: error: 'marvellous' is no verdict" in in_words(page, "dpo-twice", "1.0.0")


def test_evidence_for_an_unlisted_patch_is_drawn(evidence: dict[str, Any]) -> None:
    evidence["cells"].append(cell("gone", "9.9", "error"))
    page = picture.html(evidence, CATALOGUE)
    assert symbols(page)["gone on TRL 9.9"] == ["error-1"]
    assert data(page)["rows"][-1][0] == "gone"


def test_the_numbers_are_in_the_panel(evidence: dict[str, Any]) -> None:
    page = picture.html(evidence, CATALOGUE)
    lines = in_words(page, "dpo-twice", "1.0.0")
    assert "trl.trainer.dpo_trainer, red: reproduced, measured 0.693147, right 1.5" in lines
    assert "body trl.trainer.dpo_trainer:DPOTrainer.loss = c1:0123456789abcdef" in lines
    assert "compared with TRL 1.2.0: loss differs by 1e-08, 25 gradients by 3e-09 at most" in lines
    assert len(data(page)["cells"]) == 6


def test_a_run_on_another_release_of_equal_code_is_said_to_be_one(evidence: dict[str, Any]) -> None:
    evidence["cells"] = [cell("dpo-twice", release, "proven", ran="1.1.0") for release in ("1.1.0", "1.1.1")]
    page = picture.html(evidence, CATALOGUE)
    shared = "run on TRL 1.1.0: the code that is called is the same"
    assert [shared in in_words(page, "dpo-twice", release) for release in ("1.1.0", "1.1.1")] == [False, True]


def test_stale_evidence_is_described_in_words(evidence: dict[str, Any]) -> None:
    lines = in_words(picture.html(evidence, CATALOGUE), "dpo-twice", "1.1.1")
    assert f"tf4: proven, {matrix.STALE}" in lines


def test_hostile_text_is_escaped(evidence: dict[str, Any]) -> None:
    evidence["cells"][0]["why"] = "\x1b[31m\x00\ud800 <svg onload=alert(1)>"
    page = picture.html(evidence, CATALOGUE)
    page.encode()
    assert "<svg onload" not in page
    assert "</script><b>" not in page
    assert "DPO &lt;twice&gt; &amp; more" in page


def test_page_and_picture_load_nothing_else(evidence: dict[str, Any]) -> None:
    page, drawn = picture.html(evidence, CATALOGUE), summary.summary_svg(evidence, CATALOGUE)
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page + drawn))
    assert addresses == {"http://www.w3.org/2000/svg", "https://github.com/huggingface/trl/1"}
    assert not re.search(r"\bsrc=|@import|<link|url\((?!#hatch)", page + drawn)
    assert "<script" not in drawn


@pytest.mark.parametrize("draw", [picture.html, summary.summary_svg])
def test_the_order_of_the_evidence_changes_no_byte(evidence: dict[str, Any], draw: Callable[..., str]) -> None:
    shuffled = copy.deepcopy(evidence)
    shuffled["cells"].reverse()
    assert draw(evidence, CATALOGUE) == draw(copy.deepcopy(evidence), CATALOGUE) == draw(shuffled, CATALOGUE)


def test_sixty_patches_make_a_page_below_one_megabyte() -> None:
    releases = [f"1.{minor}.0" for minor in range(65)]
    rows = [matrix.Row(f"dpo-loss-{number}", "", "crash", ">=1", ()) for number in range(60)]
    cells = [cell(row.id, release, "absent", stack) for row in rows for release in releases for stack in ("a", "b")]
    for number, row_cell in enumerate(cells):
        row_cell["leaves"]["trl.trainer.dpo_trainer"]["red"] = {"verdict": "absent", "measured": number / 1000}
    page = picture.html({"trl_hotfix": "0", "releases": releases, "cells": cells}, rows)
    assert len(page.encode()) < 1_000_000


# The picture in the README


def proven_everywhere(releases: list[str], rows: list[Any]) -> dict[str, Any]:
    cells = [cell(row.id, release, "proven") for row in rows for release in releases]
    return {"trl_hotfix": "0.1.0", "releases": releases, "cells": cells}


def test_a_bug_counts_once_under_each_trainer_that_has_it_in_that_release() -> None:
    drawn = table(summary.summary_svg(proven_everywhere(["1.0.0", "1.1.0"], CATALOGUE[:1]), CATALOGUE[:1]))
    assert drawn == {
        "1.1.0": {"all": "1", "DPO": "1", "KTO": "1", "others": ""},
        "1.0.0": {"all": "1", "DPO": "1", "KTO": "", "others": ""},
    }


def test_the_newest_release_is_on_top_and_equal_neighbours_of_one_minor_version_share_a_line() -> None:
    rows = CATALOGUE[1:]
    evidence = proven_everywhere(["0.9.6", "1.0.0rc1", "1.0.0", "1.0.1", "1.0.2", "1.1.0"], rows)
    evidence["cells"][3]["verdict"] = "absent"
    drawn = table(summary.summary_svg(evidence, rows))
    assert list(drawn) == ["1.1.0", "1.0.2", "1.0.1", "1.0.0rc1-0", "0.9.6"]
    assert [line["GRPO"] for line in drawn.values()] == ["1", "1", "", "1", "1"]


def test_what_failed_is_stale_or_was_not_looked_at_is_an_alert_with_its_count(evidence: dict[str, Any]) -> None:
    svg = summary.summary_svg(evidence, CATALOGUE)
    drawn = table(svg)
    assert drawn["1.0.0"] == {"all": "1", "DPO": "1", "GRPO": "", "KTO": "", "others": ""}
    assert drawn["1.1.0"] == {"all": "!2", "DPO": "!1", "GRPO": "!1", "KTO": "!1", "others": ""}
    assert "1 failed, 2 unknown, 1 stale" in texts(svg)
    assert "1 repairs, each on one release, are proven" in texts(svg)
    assert svg.count('class="alert"') == 1 + sum(
        text.startswith("!") for line in drawn.values() for text in line.values()
    )
    assert "<title>TRL 1.1.0, all: 1 failed, 1 unknown</title>" in svg


def test_a_bug_that_is_stale_and_failed_counts_once(evidence: dict[str, Any]) -> None:
    evidence["cells"] = [cell("dpo-twice", "1.0.0", "unrepaired", stale=True)]
    assert table(summary.summary_svg(evidence, CATALOGUE[:1]))["1.0.0"]["DPO"] == "!1"


def test_the_trainers_with_the_most_bugs_have_columns_and_the_others_share_one() -> None:
    trainers = ["SFT", "DPO", "GRPO", "KTO", "RLOO", "ORPO", "CPO", "GKD"]
    rows = [
        matrix.Row(f"bug-{number}", "", "crash", ">=1", (), tuple((name, ">=1") for name in trainers[: number + 1]))
        for number in range(len(trainers))
    ]
    svg = summary.summary_svg(proven_everywhere(["1.0.0"], rows), rows)
    assert table(svg)["1.0.0"] == {
        "all": "8", "SFT": "8", "DPO": "7", "GRPO": "6", "KTO": "5", "RLOO": "4", "ORPO": "3", "others": "2"
    }  # fmt: skip
    assert "Others: CPO, GKD." in " ".join(texts(svg))


def test_a_bug_of_any_trainer_counts_under_every_one_and_one_of_no_trainer_among_the_others() -> None:
    any_trainer = matrix.Row("callback", "", "crash", ">=1", (), (("*", ">=1"),))
    no_trainer = matrix.Row("undeclared", "", "crash", ">=1", ())
    rows = [CATALOGUE[0], any_trainer, no_trainer]
    drawn = table(summary.summary_svg(proven_everywhere(["1.1.0"], rows), rows))
    assert drawn["1.1.0"] == {"all": "3", "DPO": "2", "KTO": "2", "others": "2"}


def many(copies: int) -> str:
    """Return the picture of ``copies`` patches of six trainers on 66 releases, three to a minor version."""
    trainers = ["DPO", "SFT", "GRPO", "KTO", "OnlineDPO", "Distillation", "NashMD"]
    rows = [
        matrix.Row(f"bug-{number}", "", "crash", ">=1", (), ((trainers[number % len(trainers)], ">=1"),))
        for number in range(copies)
    ]
    return str(summary.summary_svg(proven_everywhere([f"1.{n // 3}.{n % 3}" for n in range(66)], rows), rows))


def test_the_picture_has_the_same_size_with_110_patches() -> None:
    few, more = ElementTree.fromstring(many(11)), ElementTree.fromstring(many(110))
    assert few.attrib["viewBox"] == more.attrib["viewBox"]
    assert few.attrib["width"] == "390"
    assert len(many(110)) < 1.1 * len(many(11))


def test_text_is_readable_on_a_phone_and_said_to_a_screen_reader(evidence: dict[str, Any]) -> None:
    svg = summary.summary_svg(evidence, CATALOGUE)
    root = ElementTree.fromstring(svg)
    assert min(map(float, re.findall(r"\b(\d+)px", svg))) >= 11
    assert root.attrib["role"] == "img"
    assert "1 failed, 2 unknown, 1 stale" in root.attrib["aria-label"]
    assert root.findtext(f"{NAMESPACE}title")


def test_the_picture_in_the_readme_is_of_this_version_and_of_no_more_patches_than_there_are() -> None:
    svg = (CHECKOUT / "docs" / "matrix.svg").read_text(encoding="utf-8")
    words = texts(svg)
    assert f"trl_hotfix {trl_hotfix.__version__}" in words, "`make picture` draws docs/matrix.svg again"
    patches = len(loading.load())
    head = next(
        match for text in words if (match := re.fullmatch(r"(\d+) patch(es)? on \d+ releases of TRL, .*", text))
    )
    assert 0 < int(head[1]) <= patches
    counts = [int(text.removeprefix("!")) for line in table(svg).values() for text in line.values() if text]
    assert 0 < max(counts) <= int(head[1])


# The commands


def test_each_command_writes_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evidence: dict[str, Any]
) -> None:
    page, drawn = tmp_path / "build" / "matrix.html", tmp_path / "matrix.svg"
    monkeypatch.setattr(picture, "PAGE", page)
    monkeypatch.setattr(summary, "PICTURE", drawn)
    for module in (picture, summary):
        monkeypatch.setattr(module, "matrix", lambda: evidence)
        monkeypatch.setattr(module, "rows", lambda: tuple(CATALOGUE))
        module.main()
    assert page.read_text(encoding="utf-8") == picture.html(evidence, CATALOGUE)
    assert drawn.read_text(encoding="utf-8") == summary.summary_svg(evidence, CATALOGUE)


def test_the_rows_of_the_catalogue_have_a_trainer_for_each_bug() -> None:
    rows = matrix.rows()
    assert [row.id for row in rows] == [patch.id for patch in loading.load()]
    assert [row.id for row in rows if not row.trainers] == []
