"""The pages of the catalogue: which text is set as code, which is escaped, and how numbers are drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Patch

from bench.results import matrix
from tools.pages import bug_pages, drawings, markdown

DOCS = Path(__file__).parents[2] / "docs"
README = (DOCS.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('with loss_type="grpo" it is', 'with `loss_type="grpo"` it is'),
        ("Collator(padding_free=True), of trl.trainer", "`Collator(padding_free=True)`, of trl.trainer"),
        ("beta * KL <think> a|b [x]", r"beta \* KL &lt;think> a&#124;b \[x\]"),
        ("as __init__ and model.some_name do", "as `__init__` and `model.some_name` do"),
        ("DPO (arXiv:2305.18290)", "DPO ([arXiv:2305.18290](https://arxiv.org/abs/2305.18290))"),
        ("see issue 2995", "see [issue 2995](https://github.com/huggingface/trl/issues/2995)"),
        ("pull\n request 7", "[pull request 7](https://github.com/huggingface/trl/pull/7)"),
    ],
)
def test_plain_text_becomes_markdown(text: str, expected: str) -> None:
    assert markdown.prose(text) == expected


def test_the_table_of_checks_has_each_patch_and_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_id = "dpo-aux-loss-unpack-crash"
    counts = {"total": 40, "killed": 39, "equivalent": {"a": "b"}, "survived": ["c"]}
    counts |= {"branches": 8, "missed": ["d"]}
    monkeypatch.setattr(bug_pages, "matrix", lambda: {**matrix.matrix(), "mutants": {patch_id: counts}})
    lines = bug_pages.pages()["bugs/checks.md"].splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| [`")}
    assert rows.keys() == {patch.id for patch in loading.load()}
    assert rows.pop(patch_id).endswith("| 40 | 97.5 % | 1 | 87.5 % | 4 of 4 |")
    assert all("| not counted |" in row for row in rows.values())
    assert any("40 mutants, and the checks kill 97.5 %" in line for line in lines)


def test_the_readme_says_how_many_mutants_are_noticed() -> None:
    counts = bug_pages.matrix()["mutants"].values()
    total, killed = (sum(count[name] for count in counts) for name in ("total", "killed"))
    said = re.search(r"some ([\d,]+) in all;\s+our checks notice (\d+) %", README)
    assert said is not None, "the README does not say it"
    ways, noticed = (int(number.replace(",", "")) for number in said.groups())
    assert total == pytest.approx(ways, rel=0.05)
    assert 100 * killed / total == pytest.approx(noticed, abs=1)


COST: dict[str, Any] = {
    "micro_batch_us": 85.4,
    "once_ms": None,
    "tokens": 1.25,
    "share": {"1000": 0.0123, "100000": 5e-5},
}
COST |= {"bytes": {"1000": 16_000, "100000": 1_600_000}, "above_goal": True, "share_of_mixture": 7.394}
COST |= {"walks_each_time": True, "modules": {"mixture": 31_159}, "walk_ms": {"mixture": {"later": 112.3}}}


def test_a_page_says_what_its_patch_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, unmeasured = "dpo-aux-loss-unpack-crash", "dpo-aux-loss-dropped"
    monkeypatch.setattr(bug_pages.cost_pages, "costs", lambda: {measured: COST})
    texts = bug_pages.pages()
    lines = {name: _facts(texts[f"bugs/{name}.md"])["costs"] for name in (measured, unmeasured)}
    assert lines[unmeasured].startswith("not measured")
    for said in (
        "85 µs in a micro-batch in which it runs",
        "**1.2 %** of a step of 1,000 tokens and less than 0.01 % of a step of 100,000 tokens",
        "16 kB for 1,000 tokens and 1.6 MB for 100,000 tokens",
        "1.25 times the tokens",
        "every module: 112 ms with 31,159 modules, **739 %** of a step",
        "**this is more than 1 % of a step**",
    ):
        assert said in lines[measured]


def test_the_table_of_costs_has_each_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_id = "dpo-aux-loss-unpack-crash"
    monkeypatch.setattr(bug_pages.cost_pages, "costs", lambda: {patch_id: COST})
    lines = bug_pages.pages()["bugs/costs.md"].splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| [`")}
    assert rows.keys() == {patch.id for patch in loading.load()}
    assert rows.pop(patch_id).endswith("| 85 µs | **1.2 %** | less than 0.01 % | 16 kB | 1.6 MB | 112 ms |  | 1.25 |")
    assert all("| not measured |" in row for row in rows.values())
    assert any(line.startswith("1 of ") and "1 of them take more than 1 %" in line for line in lines)


def _facts(page: str) -> dict[str, str]:
    rows = (line.split(" | ", 1) for line in page.splitlines() if line.startswith("| ") and line.count(" | ") == 1)
    return {name.removeprefix("| "): value.removesuffix(" |") for name, value in rows}


def test_a_page_has_what_is_not_repaired_where_the_entry_has_it() -> None:
    texts = bug_pages.pages()
    for patch in loading.load():
        head, heading, section = texts[f"bugs/{patch.id}.md"].partition("\n\n## What is not repaired\n\n")
        assert bool(heading) == (patch.not_repaired is not None), patch.id
        if patch.not_repaired is not None:
            assert section.startswith(markdown.prose(patch.not_repaired) + "\n\n## ")
            assert head.endswith(markdown.prose(patch.how))


def test_a_bug_without_a_repair_has_a_page_and_a_row_below_the_patches() -> None:
    texts = bug_pages.pages()
    patched, heading, without = texts["bugs/index.md"].partition("## Known, no repair here")
    assert heading
    for bug in loading.without_repair():
        page = texts[f"bugs/{bug.id}.md"]
        assert f"`{bug.id}`: known, no repair here" in page
        assert "## What the patch does" not in page
        fixed_in = bug.upstream.fixed_in
        assert (f"TRL {fixed_in} has the fix" if fixed_in else "No release of TRL has a fix") in page
        assert page.count("\n- ") == len(bug.hits)
        assert f"]({bug.id}.md)" in without
        assert f"]({bug.id}.md)" not in patched
    assert not any(f"`{bug.id}`" in texts["bugs/checks.md"] for bug in loading.without_repair())


def test_the_page_of_releases_counts_what_a_trainer_may_hit_and_tells_repaired_from_not() -> None:
    counts = bug_pages.release_pages.counts()
    bugs = bug_pages.release_pages.bugs()
    assert list(counts) == list(bug_pages.matrix()["releases"])
    without_repair = {bug.id for bug in loading.without_repair()}
    for release, trainer in (("0.28.0", "Reward"), ("0.29.0", "Reward"), ("0.14.0", "GRPO")):
        hit = [bug.id for bug in bugs if {trainer, "*"} & bug_pages.release_pages.trainers_hit(bug, release)]
        assert hit, (release, trainer)
        known = [name for name in hit if name in without_repair]
        assert counts[release][trainer] == (len(hit) - len(known), len(known))
    assert "GRPO" not in counts["0.13.0"]
    assert not any(bug.id == "grpo-zero-loss-diagnosis" for bug in bugs)
    lines = bug_pages.pages()["bugs/releases.md"].splitlines()
    head = next(line for line in lines if line.startswith("| TRL |"))
    names = [name.strip() for name in head.strip("|").split("|")][1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[lines.index(head) + 2 :]]
    assert [release for release, *_ in rows] == list(reversed(counts))
    for release, *cells in rows:
        shown = {name: sum(map(int, cell.split("+"))) for name, cell in zip(names, cells, strict=True) if cell}
        assert shown == {name: sum(count) for name, count in counts[release].items()}
        without = {name for name, cell in zip(names, cells, strict=True) if "+" in cell}
        assert without == {name for name, count in counts[release].items() if count[1]}


def test_the_sidebar_has_each_bug_once_under_its_trainers_and_what_newer_releases_have_first() -> None:
    groups = {name: bugs for entry in bug_pages.nav()[4:] for name, bugs in entry.items()}
    listed = [bug_id for bugs in groups.values() for bug in bugs for bug_id in bug]
    known = {bug.id: bug for bug in (*loading.load(), *loading.without_repair())}
    assert sorted(listed) == sorted(known)
    assert "dpo-aux-loss-dropped" in {bug_id for bug in groups["DPO"] for bug_id in bug}
    releases = list(bug_pages.matrix()["releases"])
    for group, bugs in groups.items():
        last = [
            max(index for index, release in enumerate(releases) if bug_pages.in_range(release, known[bug_id].trl))
            for bug in bugs
            for bug_id in bug
        ]
        assert last == sorted(last, reverse=True), group


def test_a_page_says_no_sentence_twice() -> None:
    texts = bug_pages.pages()
    for patch in loading.load():
        sections = dict(part.split("\n\n", 1) for part in texts[f"bugs/{patch.id}.md"].split("\n## ")[1:])
        seen, detail = (set(_sentences(sections.get(name, ""))) for name in ("What you see", "In TRL's code"))
        assert not seen & detail, patch.id
        (first, *rest) = markdown.from_docstring(markdown.docstring(patch))
        # The summary of the module says what the title and the first section say.
        kept = sections.get("In TRL's code", "").startswith(first)
        assert not kept or re.match(r"(It|Its|They|Their|These|This|That|Those|Both)\b", rest[0]), patch.id


def _sentences(text: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.])\s+", " ".join(text.split())) if sentence.count(" ") > 3]


def test_a_page_says_what_the_bug_means_for_an_old_run() -> None:
    texts = bug_pages.pages()
    for bug in (*loading.load(), *loading.without_repair()):
        section = texts[f"bugs/{bug.id}.md"].partition("\n## Your old run\n")[2].partition("\n## ")[0]
        assert bool(section) == (bug.severity.value != "diagnosis"), bug.id
        if section:
            assert section.count("\n- ") == len(bug.hits)
            assert "trl-hotfix audit output_dir/" in section
            assert "**Must I train again?**" in section


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (["unset", "dapo", "cispo"], 'is not given or `"dapo"` or `"cispo"`'),
        ("!=@gradient_accumulation_steps", "is another than `gradient_accumulation_steps`"),
        (">1", "is above `1`"),
        ("not by *peft*", "is not made by a call with `peft` in its name"),
        (True, "is `True`"),
        ("set", "is given"),
    ],
)
def test_a_condition_is_said_in_words(condition: object, words: str) -> None:
    assert bug_pages.old_runs.condition_in_words(condition) == words


def test_a_docstring_keeps_its_formulas_and_lists() -> None:
    text = "One ``a * b``\nline.\n\n    loss = x * y\n      + z_1\n\n- first\n  of two\n- ``second``"
    assert list(markdown.from_docstring(text)) == [
        "One `a * b` line.",
        "```text\nloss = x * y\n  + z_1\n```",
        "- first of two\n- `second`",
    ]


def widths(drawn: str) -> dict[str, float]:
    return {kind: float(width) for kind, width in re.findall(r'class="(\w+)" [^>]* width="([\d.]+)"', drawn)}


def test_bars_are_as_long_as_their_numbers() -> None:
    drawn = widths(drawings.bars("loss", 1.0, 2.0, 2.0))
    assert drawn == {"wrong": 100.0, "repaired": 200.0, "right": 200.0}
    assert widths(drawings.bars("loss", -1.0, 1.0, 1.0))["wrong"] == 100.0


def test_bars_have_an_axis_with_ticks_and_words_for_who_cannot_see_them() -> None:
    drawn = drawings.bars("norm of the gradient", 1.0, 2.0, 2.0)
    assert re.findall(r'text-anchor="middle">([^<]+)</text>', drawn) == ["0", "1", "2", "norm of the gradient"]
    assert 'aria-label="norm of the gradient: wrong 1, repaired 2, right 2"' in drawn


def test_what_is_nearly_equal_is_drawn_as_dots_on_an_axis_without_0() -> None:
    drawn = drawings.bars("loss", 4.5, 4.25, 4.25)
    dots = {kind: float(x) for kind, x in re.findall(r'<circle class="(\w+)" cx="([\d.]+)"', drawn)}
    assert dots["wrong"] > dots["repaired"] == dots["right"]
    assert re.findall(r'text-anchor="middle">([^<]+)</text>', drawn) == ["4.2", "4.4", "loss"]


def test_what_is_no_number_has_no_bar() -> None:
    drawn = drawings.bars("loss", float("nan"), 2, 2)
    assert widths(drawn) == {"repaired": 200.0, "right": 200.0}
    assert ">nan</text>" in drawn
    assert drawings.bars("loss", None, None, None) == ""


def test_curves_go_through_their_losses_and_have_a_gap_where_one_is_no_number() -> None:
    drawn = drawings.curves({"unpatched": [2.0, None, 1.0], "patched": [2.0, 1.5, 0.0]})
    lines = re.findall(r'<polyline class="(\w+)" points="([^"]*)"', drawn)
    assert [points for kind, points in lines if kind == "wrong"][1:] == ["44.0,44.0", "340.0,104.0"]
    assert [points for kind, points in lines if kind == "repaired"][1:] == ["44.0,44.0 192.0,74.0 340.0,164.0"]
    assert 'aria-label="loss in the log by optimizer step: wrong 2 to 1, repaired 2 to 0"' in drawn
    assert all(f">{words}</text>" in drawn for words in ("loss in the log", "optimizer step", "1", "3"))


def test_a_page_has_a_plot_of_each_proof_whose_number_has_a_name_and_no_other() -> None:
    texts, curves = bug_pages.pages(), bug_pages.matrix()["curves"]
    named = yaml.safe_load((Path(bug_pages.__file__).parent / "measured.yaml").read_text(encoding="utf-8"))
    ids = [patch_id for of_kind in named.values() for patch_id in of_kind]
    assert len(ids) == len(set(ids))
    assert set(ids) <= {patch.id for patch in loading.load()}
    for patch in loading.load():
        drawn = texts[f"bugs/{patch.id}.md"].count('" role="img" aria-label="') - 1
        has_curve = patch.id in curves and curves[patch.id]["revision"] == patch.revision
        assert drawn == (patch.id in ids or has_curve), patch.id


def test_numbers_of_two_batches_are_not_compared() -> None:
    red, green = {"measured": 1.0, "right": 0.9}, {"measured": 1.4, "right": 1.4}
    assert not bug_pages._are_of_one_run(red, green)
    assert bug_pages._are_of_one_run(red, {"measured": 0.9, "right": 0.9})


def test_a_page_begins_with_the_harm_who_is_hit_and_the_way_out() -> None:
    texts = bug_pages.pages()
    for bug in (*loading.load(), *loading.without_repair()):
        lead = texts[f"bugs/{bug.id}.md"].partition("\n## ")[0]
        assert re.findall(r"^\*\*(.*?)\.\*\* ", lead, re.MULTILINE) == ["Harm", "Hits", "Get rid of it"]
        assert ("repairs it" in lead or "names it" in lead) == isinstance(bug, Patch)


def test_curves_are_shown_of_the_patch_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third, *_ = loading.load()
    runs = {name: {"release": "0.11.4", "losses": [1.0, 2.0]} for name in ("unpatched", "patched")}
    curve = {"patch": first.id, "revision": first.revision, "stack": "tf4.44", "runs": runs}
    outdated = {**curve, "patch": second.id, "revision": second.revision + 1}
    evidence = {**bug_pages.matrix(), "curves": {first.id: curve, second.id: outdated}}
    monkeypatch.setattr(bug_pages, "matrix", lambda: evidence)
    texts = bug_pages.pages()
    assert [patch.id for patch in (first, second, third) if "<polyline" in texts[f"bugs/{patch.id}.md"]] == [first.id]


def test_the_curve_of_a_patched_release_is_that_of_the_fixed_one_and_not_that_without_the_patch() -> None:
    curves = bug_pages.matrix()["curves"]
    assert curves.keys() <= {patch.id for patch in loading.load()}
    for patch_id, curve in curves.items():
        losses = {name: run["losses"] for name, run in curve["runs"].items()}
        assert losses["unpatched"] != losses["patched"]
        # The log has four decimal places.
        assert losses.get("fixed", losses["patched"]) == pytest.approx(losses["patched"], abs=1.01e-4), patch_id
