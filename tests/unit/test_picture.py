"""The page of the evidence, ``picture.html``, and the picture in the README, ``summary.summary_svg``."""

from __future__ import annotations

import copy
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trl_hotfix
from trl_hotfix.catalogue import loading

from bench.pages import picture, summary
from bench.results import matrix

CHECKOUT = Path(__file__).parents[2]

NAMESPACE = "{http://www.w3.org/2000/svg}"
CATALOGUE = [
    matrix.Row(
        "dpo-twice",
        "DPO <twice> & more",
        "wrong-loss",
        ">=1.0,<1.2",
        ("https://github.com/huggingface/trl/1",),
    ),
    matrix.Row("grpo-never", "GRPO never", "crash", ">=1.1", ()),
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


def bars(drawn: str) -> dict[str, dict[str, float]]:
    """Return the height of each part of the bars, by release and kind."""
    shown = {}
    for group in ElementTree.fromstring(drawn).iter(f"{NAMESPACE}g"):
        release = (group.findtext(f"{NAMESPACE}title") or "").partition(": ")[0].removeprefix("TRL ")
        parts = group.iter(f"{NAMESPACE}rect")
        shown[release] = {part.attrib["class"]: float(part.attrib["height"]) for part in parts}
    return shown


def words_of(drawn: str) -> dict[str, str]:
    """Return what each bar says of its release."""
    titles = re.findall(r"<g><title>TRL (.*?): (.*?)</title>", drawn)
    return dict(titles)


def test_a_bar_has_the_repaired_bugs_of_its_release_the_silent_ones_at_its_foot() -> None:
    rows = [*CATALOGUE, matrix.Row("if-named", "", "wrong-loss", ">=1.0", (), default=False)]
    drawn = summary.summary_svg(proven_everywhere(["1.0.0", "1.1.0"], rows), rows)
    assert words_of(drawn)["1.1.0"] == "1 silent, repaired, 2 other, repaired"
    heights = bars(drawn)["1.1.0"]
    assert list(heights) == ["silent", "loud"]
    assert heights["loud"] == pytest.approx(2 * heights["silent"], abs=0.2)


def test_known_bugs_without_a_repair_are_the_head_of_a_bar() -> None:
    rows = CATALOGUE[:1]
    drawn = summary.summary_svg(proven_everywhere(["1.0.0", "1.1.0"], rows), rows, {"1.1.0": 2})
    assert words_of(drawn) == {"1.0.0": "1 silent, repaired", "1.1.0": "1 silent, repaired, 2 known, no repair"}
    assert list(bars(drawn)["1.1.0"]) == ["silent", "known"]
    assert "1.1.0: 1 silent, repaired, 2 known, no repair" in ElementTree.fromstring(drawn).attrib["aria-label"]


def test_releases_go_from_the_oldest_to_the_newest_and_their_numbers_do_not_overlap() -> None:
    drawn = many(11)
    assert list(bars(drawn)) == [f"1.{n // 3}.{n % 3}" for n in range(66)]
    named = [
        (float(text.attrib["x"]), text.text or "")
        for text in ElementTree.fromstring(drawn).iter(f"{NAMESPACE}text")
        if re.fullmatch(r"1\.\d+(\.\d+)?", text.text or "")
    ]
    assert (named[0][1], named[-1][1]) == ("1.0.0", "1.21.2")
    starts = [x for x, _ in named[:-1]]
    assert all(after - before >= 40 for before, after in itertools.pairwise(starts))
    assert named[-1][0] - 44 - starts[-1] >= 36


def test_what_failed_is_stale_or_was_not_looked_at_is_an_alert_with_its_count(evidence: dict[str, Any]) -> None:
    svg = summary.summary_svg(evidence, CATALOGUE)
    assert words_of(svg) == {
        "1.0.0": "1 silent, repaired",
        "1.1.0": "2 not proven",
        "1.1.1": "2 not proven",
    }
    assert list(bars(svg)["1.1.0"]) == ["alert"]
    assert "not proven" in texts(svg)
    assert "1 repairs, each on one release, are proven; 1 failed, 2 unknown, 1 stale" in texts(svg)


def test_where_nothing_failed_the_legend_has_no_alert() -> None:
    drawn = many(11)
    assert "not proven" not in texts(drawn)
    assert "726 repairs, each on one release, are proven; nothing failed" in texts(drawn)


def many(copies: int) -> str:
    """Return the picture of ``copies`` patches on 66 releases, three to a minor version."""
    rows = [matrix.Row(f"bug-{number}", "", "crash", ">=1", ()) for number in range(copies)]
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
    pattern = rf"trl_hotfix {re.escape(trl_hotfix.__version__)}, (\d+) patch(es)? on \d+ releases of TRL, .*"
    heads = [match for text in texts(svg) if (match := re.fullmatch(pattern, text))]
    assert len(heads) == 1, "`make picture` draws docs/matrix.svg again"
    assert 0 < int(heads[0][1]) <= len(loading.load())
    assert all(bars(svg).values()), "a release has a bar"


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
        if module is summary:
            monkeypatch.setattr(module, "known_bugs", lambda releases: dict.fromkeys(releases, 3))
        module.main()
    assert page.read_text(encoding="utf-8") == picture.html(evidence, CATALOGUE)
    known = dict.fromkeys(evidence["releases"], 3)
    assert drawn.read_text(encoding="utf-8") == summary.summary_svg(evidence, CATALOGUE, known)


def test_the_rows_are_those_of_the_catalogue() -> None:
    rows = matrix.rows()
    assert [row.id for row in rows] == [patch.id for patch in loading.load()]
    assert [row.default for row in rows] == [patch.default for patch in loading.load()]
    assert not all(row.default for row in rows)
