"""The checks of one patch: versions, names, options and hits."""

from __future__ import annotations

from datetime import date

import pytest

from trl_hotfix.catalogue import parsing

from helpers.example_entry import (
    ENTRY,
    EXAMPLE,
    OPTIONS,
    the_mistake,
    with_lines,
    with_options,
)

# Versions


def test_an_invalid_range_is_named_with_its_line() -> None:
    line, message = the_mistake(with_lines({5: '  trl: "0.11.0 and later"'}))
    assert line == 5
    assert message.startswith("trl: '0.11.0 and later' is not a PEP 440 range")


def test_an_invalid_range_of_a_target_is_at_its_line() -> None:
    line, message = the_mistake(with_lines({12: ENTRY.splitlines()[11] + '\n      trl: "~0.11"'}))
    assert line == 13
    assert message.startswith("trl: '~0.11' is not a PEP 440 range")


def test_an_invalid_range_of_a_requirement_is_at_its_line() -> None:
    line, message = the_mistake(ENTRY + '  requires:\n    torch: ">=2"\n    deepspeed: new\n')
    assert line == 16
    assert message.startswith("requires deepspeed: 'new' is not a PEP 440 range")


def test_a_layer_has_its_versions_in_requires() -> None:
    line, message = the_mistake(ENTRY + '  requires: {peft: ">=0.8"}\n  layer: transformers\n')
    assert line == 15
    assert message == "layer: 'transformers' has no versions in requires, which has peft"


def test_harm_and_retrain_come_together() -> None:
    line, message = the_mistake(ENTRY + "  harm: scale\n")
    assert (line, message) == (14, "harm is given without retrain: an entry has both or neither")
    line, message = the_mistake(ENTRY + '  retrain: "No."\n')
    assert (line, message) == (14, "retrain is given without harm: an entry has both or neither")


def test_an_invalid_fixed_version_is_a_mistake() -> None:
    assert the_mistake(with_lines({6: "  upstream: {fixed_in: soon}"})) == (6, "fixed_in: 'soon' is not a version")


def test_a_range_without_an_end_needs_a_review_date() -> None:
    open_ended = {5: '  trl: ">=0.11.0"'}
    line, message = the_mistake(with_lines(open_ended))
    assert line == 5
    assert message.startswith("trl: '>=0.11.0' has no end and the patch no review_by; ")
    for written in ('"2027-05-21"', "2027-05-21"):
        (patch,) = parsing.parse(with_lines(open_ended) + f"  review_by: {written}\n", "patches.yaml")
        assert patch.review_by == date(2027, 5, 21)
    assert the_mistake(with_lines(open_ended) + "  review_by: soon\n")[0] == 14
    assert the_mistake(ENTRY + "  review_by: 2027-05-21\n") == (
        14,
        "review_by: the range '>=0.11.0,<0.12.0' has an end, so it needs no review",
    )


def test_a_revision_starts_at_1() -> None:
    assert the_mistake(with_lines({2: "  revision: 0"})) == (2, "revision 0 is less than 1")


# Names


def test_a_duplicate_id_is_named_with_both_lines() -> None:
    assert the_mistake(ENTRY + ENTRY) == (14, f"duplicate id {EXAMPLE.id!r}, first used on line 1")


def test_a_former_id_is_of_one_patch_and_is_no_present_one() -> None:
    (patch,) = parsing.parse(f"{ENTRY}  formerly: [old-name, older-name]\n", "patches.yaml")
    assert patch.formerly == ("old-name", "older-name")
    duplicate = f"duplicate id {EXAMPLE.id!r}, first used on line 1"
    assert the_mistake(f"{ENTRY}  formerly: [old-name, {EXAMPLE.id}]\n") == (14, duplicate)
    twice = f"{ENTRY}  formerly:\n  - old-name\n  - old-name\n"
    assert the_mistake(twice) == (16, "duplicate id 'old-name', first used on line 15")
    assert the_mistake(f"{ENTRY}  formerly: [Old_name]\n")[1].startswith("formerly: 'Old_name' is not lower-case")
    assert "formerly" in the_mistake(f"{ENTRY}  formerly: old-name\n")[1]


@pytest.mark.parametrize("bad", ["Upper-Case", "under_score", "'-'", "a--b", "../x", "a.b", "''"])
def test_an_id_is_lower_case_words(bad: str) -> None:
    line, message = the_mistake(with_lines({1: f"- id: {bad}"}))
    assert line == 1
    assert message.endswith("is not lower-case words joined by '-'")


@pytest.mark.parametrize("module", ["transformers.trainer", "trl", "trlx.trainer", "trl.", "trl..trainer", "trl.a b"])
def test_a_target_outside_trl_is_refused(module: str) -> None:
    line, message = the_mistake(with_lines({10: f"    - module: {module}"}))
    assert line == 10
    assert message == f"target {module!r} is outside 'trl.'; only modules of TRL are patched"


@pytest.mark.parametrize("attribute", ["A.b.c", "A.", ".b", "a b", "1a", "A.b()", "''"])
def test_an_attribute_is_a_function_or_a_method(attribute: str) -> None:
    line, message = the_mistake(with_lines({11: f"      attribute: {attribute}"}))
    assert line == 11
    assert message.endswith("is not a function or a Class.method")


def test_no_targets_are_a_mistake() -> None:
    line, message = the_mistake(with_lines({9: "  targets: []", 10: None, 11: None, 12: None}))
    assert line == 9
    assert message.startswith("targets is empty")


# Options and hits


@pytest.mark.parametrize(
    ("right", "wrong", "line", "message"),
    [
        (
            "default: sequence",
            "default: sequenc",
            17,
            "default 'sequenc' is not one of the choices; did you mean 'sequence'?",
        ),
        ("global:", "Global|x:", 16, "'Global|x' is not lower-case words joined by '-' or '_'"),
        (", global: every token", "", 16, "the option 'over' has 1 choices, expected two or more"),
        ("      default: sequence\n", "", 16, "the option lacks 'default'"),
        ("default:", "defalt: x\n      default:", 17, "unknown key 'defalt' in an option; did you mean 'default'?"),
        ("{sequence: as in the paper, global: every token}", "[sequence, global]", 16, "choices: Expected"),
    ],
)
def test_a_mistake_in_an_option_is_named_with_its_line(right: str, wrong: str, line: int, message: str) -> None:
    refused = the_mistake(with_options(OPTIONS.replace(right, wrong)))
    assert (refused[0], refused[1][: len(message)]) == (line, message)


HITS = """\
  hits:
    - trainers: [DPO, KTO]
      trl: ">=0.11.2"
      when:
        precompute_ref_log_probs: true
        ref_model: [unset, by *peft*]
        model.adapter_name: "!=default"
      depends: the model is a mixture of experts
      symptom: the loss stays at 0.6931
    - trainers: ["*"]
      symptom: it crashes
"""


@pytest.mark.parametrize(
    ("right", "wrong", "line", "message"),
    [
        ("[DPO, KTO]", "[DPO, KTOTrainer]", 15, "trainer 'KTOTrainer' is not a name such as DPO, without Trainer"),
        ("[DPO, KTO]", "[DPO, kto]", 15, "trainer 'kto' is not a name such as DPO"),
        ("[DPO, KTO]", "[]", 15, "trainers is empty"),
        ("[DPO, KTO]", "DPO", 15, "trainers: Expected `array`, got `str`"),
        ('">=0.11.2"', '"later"', 16, "trl: 'later' is not a PEP 440 range"),
        ("precompute_ref_log_probs: true", "Precompute: true", 18, "when: 'Precompute' is not the name of an argument"),
        ("precompute_ref_log_probs: true", "a.b.c: true", 18, "when: 'a.b.c' is not the name of an argument"),
        ("probs: true", "probs: []", 18, "when: precompute_ref_log_probs: an empty list of alternatives"),
        ("probs: true", "probs: [[1]]", 18, "when: precompute_ref_log_probs: a list in a list"),
        ("probs: true", "probs: {a: 1}", 18, "when: precompute_ref_log_probs: expected a literal, a word"),
        ("probs: true", "probs: 2026-05-21", 18, "when: precompute_ref_log_probs: expected a literal, a word"),
        ("probs: true", 'probs: ">many"', 18, "when: precompute_ref_log_probs: '>many' compares with nothing"),
        ("probs: true", 'probs: "!="', 18, "when: precompute_ref_log_probs: '!=' compares with nothing"),
        ("probs: true", 'probs: "!=@A b"', 18, "when: precompute_ref_log_probs: '!=@A b': 'A b' is not the name"),
        ("[unset, by *peft*]", "[unset, by]", 19, "when: ref_model: 'by': expected names such as 'by BEMACallback'"),
        ("[unset, by *peft*]", "by a b", 19, "when: ref_model: 'by a b': expected names such as"),
        ("the model is a mixture of experts", "''", 21, "depends is empty"),
        ("the loss stays at 0.6931", "' '", 22, "symptom is empty"),
        ("      symptom: it crashes\n", "", 23, "the hit lacks 'symptom'"),
        (
            "symptom: it",
            "symptoms: x\n      symptom: it",
            24,
            "unknown key 'symptoms' in a hit; did you mean 'symptom'?",
        ),
    ],
)
def test_a_mistake_in_a_hit_is_named_with_its_line(right: str, wrong: str, line: int, message: str) -> None:
    assert right in HITS
    refused = the_mistake(ENTRY + HITS.replace(right, wrong, 1))
    assert (refused[0], refused[1][: len(message)]) == (line, message)
