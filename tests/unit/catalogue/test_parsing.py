"""An entry becomes a patch, or a list of mistakes with their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_hotfix.catalogue import parsing
from trl_hotfix.errors import CatalogueError, Mistake
from trl_hotfix.model import Called, Hit, Patch, Severity, Target

from helpers.example_entry import (
    ENTRY,
    EXAMPLE,
    OPTIONS,
    mistakes,
    the_mistake,
    with_lines,
    with_options,
)


def test_a_valid_entry_is_a_patch() -> None:
    (patch,) = parsing.parse(ENTRY, "patches.yaml")
    assert patch.id == EXAMPLE.id
    assert patch.severity is Severity.CRASH
    assert patch.upstream.fix == (2, 3)
    assert patch.requires == {}
    assert patch.default is True
    assert patch.targets == (
        Target("trl.trainer.dpo_trainer", "DPOTrainer.get_batch_loss_metrics", EXAMPLE.targets[0].wrapper),
    )


def test_off_is_a_default() -> None:
    (patch,) = parsing.parse(ENTRY + "  default: off\n", "patches.yaml")
    assert patch.default is False


def test_requirements_are_a_mapping_of_ranges() -> None:
    (patch,) = parsing.parse(ENTRY + '  requires: {deepspeed: ">=0.14.5"}\n', "patches.yaml")
    assert patch.requires == {"deepspeed": ">=0.14.5"}


def test_an_empty_list_is_an_empty_catalogue() -> None:
    assert parsing.parse("[]", "patches.yaml") == ()


def test_an_option_has_explained_choices_and_a_default() -> None:
    (patch,) = parsing.parse(with_options(OPTIONS), "patches.yaml")
    option = patch.options["over"]
    assert option.choices == {"sequence": "as in the paper", "global": "every token"}
    assert option.default == "sequence"


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


def test_hits_declare_what_a_bug_needs() -> None:
    (patch,) = parsing.parse(ENTRY + HITS, "patches.yaml")
    first, second = patch.hits
    assert first == Hit(
        trainers=("DPO", "KTO"),
        trl=">=0.11.2",
        when={
            "precompute_ref_log_probs": True,
            "ref_model": ["unset", "by *peft*"],
            "model.adapter_name": "!=default",
        },
        depends="the model is a mixture of experts",
        symptom="the loss stays at 0.6931",
    )
    assert (second.trainers, second.when, second.depends, second.trl) == (("*",), {}, None, None)


# Unknown and missing keys


def test_an_unknown_key_gets_a_suggestion() -> None:
    line, message = the_mistake(ENTRY + "  requries: {}\n")
    assert line == 14
    assert message == "unknown key 'requries' in a patch; did you mean 'requires'?"


def test_an_unknown_key_of_a_target_gets_a_suggestion() -> None:
    line, message = the_mistake(with_lines({12: f"      wrapper: {EXAMPLE.targets[0].wrapper}\n      tracde: true"}))
    assert line == 13
    assert message == "unknown key 'tracde' in a target; did you mean 'traced'?"


def test_an_unknown_key_of_upstream_gets_a_suggestion() -> None:
    line, message = the_mistake(with_lines({6: "  upstream:\n    fixed: 3"}))
    assert line == 7
    assert message == "unknown key 'fixed' in an upstream; did you mean 'fixed_in'?"


def test_an_unknown_key_like_no_other_gets_no_suggestion() -> None:
    assert the_mistake(ENTRY + "  zzz: 1\n") == (14, "unknown key 'zzz' in a patch")


@pytest.mark.parametrize(
    ("line", "key"), [(2, "revision"), (3, "title"), (4, "severity"), (5, "trl"), (7, "why"), (8, "how")]
)
def test_a_missing_key_is_at_the_line_of_its_entry(line: int, key: str) -> None:
    assert the_mistake(with_lines({line: None})) == (1, f"the patch lacks {key!r}")


def test_a_missing_key_of_a_target_is_at_its_line() -> None:
    assert the_mistake(with_lines({12: None})) == (10, "the target lacks 'wrapper'")


# Values of another type


def test_an_unquoted_range_is_a_mistake_with_a_remedy() -> None:
    line, message = the_mistake(with_lines({5: "  trl: 1.10"}))
    assert line == 5
    assert message.startswith("trl: ")
    assert "quotes" in message


def test_an_unquoted_version_is_a_mistake_with_a_remedy() -> None:
    line, message = the_mistake(with_lines({6: "  upstream: {fixed_in: 1.10}"}))
    assert line == 6
    assert message.startswith("fixed_in: ")
    assert "quotes" in message


def test_an_invalid_severity_is_named_with_the_choices() -> None:
    line, message = the_mistake(with_lines({4: "  severity: bad"}))
    assert line == 4
    assert message.startswith("severity: ")
    assert all(choice.value in message for choice in Severity)


WRAPPER_LINE = f"      wrapper: {EXAMPLE.targets[0].wrapper}\n"


def test_a_target_declares_when_it_is_called_or_does_not() -> None:
    (patch,) = parsing.parse(with_lines({12: f"{WRAPPER_LINE}      called: some steps"}), "patches.yaml")
    assert patch.targets[0].called is Called.SOME_STEPS
    (patch,) = parsing.parse(ENTRY, "patches.yaml")
    assert patch.targets[0].called is None


def test_an_unknown_moment_is_named_with_the_choices() -> None:
    line, message = the_mistake(with_lines({12: f"{WRAPPER_LINE}      called: every step"}))
    assert line == 13
    assert message.startswith("called: ")
    assert f"(one of {', '.join(choice.value for choice in Called)})" in message


@pytest.mark.parametrize("revision", ["'1'", "1.5", "true", "null", "[1]", "one"])
def test_a_revision_is_a_whole_number(revision: str) -> None:
    line, message = the_mistake(with_lines({2: f"  revision: {revision}"}))
    assert line == 2
    assert message.startswith("revision: ")


@pytest.mark.parametrize("text", ["", "\n\n", "# a comment\n", "---\n", "null"])
def test_an_empty_file_is_a_mistake(text: str) -> None:
    line, message = the_mistake(text)
    assert line <= 2
    assert message == "expected a list of entries, found nothing"


def test_a_mapping_instead_of_a_list_is_a_mistake() -> None:
    assert the_mistake("\npatches: []\n") == (2, "expected a list of entries, found a mapping")


def test_text_instead_of_a_list_is_a_mistake() -> None:
    assert the_mistake("nothing") == (1, "expected a list of entries, found text")


def test_an_entry_that_is_not_a_mapping_is_a_mistake() -> None:
    assert the_mistake(ENTRY + "- more\n") == (14, "expected a patch (a mapping), found text")


def test_null_targets_are_a_mistake() -> None:
    text = with_lines({9: "  targets:", 10: None, 11: None, 12: None})
    line, message = the_mistake(text)
    assert line == 9
    assert message.startswith("targets: ")


def test_a_null_target_is_a_mistake() -> None:
    text = with_lines({10: "    -", 11: None, 12: None})
    assert the_mistake(text) == (10, "expected a target (a mapping), found nothing")


# All mistakes at once


def test_all_mistakes_of_an_entry_are_sorted_by_line() -> None:
    text = with_lines(
        {
            2: "  revision: 0",
            5: '  trl: "later"',
            6: "  upstream: {fixed_in: soon}",
            10: "    - module: torch",
            12: "      wrapper: nothing_like_it",
        }
    )
    assert [line for line, _ in mistakes(text)] == [2, 5, 6, 10, 12]


def test_mistakes_of_several_entries_are_sorted_by_line() -> None:
    text = "- more\n" + with_lines({4: "  severity: bad", 5: "  trl: 1.10"}) + with_lines({3: None, 8: "  hwo: so"})
    assert [line for line, _ in mistakes(text)] == [1, 5, 6, 15, 15, 15, 21]


LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")


def patches_or_mistakes(text: str) -> None:
    refused: tuple[Mistake, ...] | None = None
    try:
        patches = parsing.parse(text, "patches.yaml")
    except CatalogueError as error:
        refused = error.mistakes
    if refused is None:
        assert all(isinstance(patch, Patch) for patch in patches)
        return
    last = len(LINE_BREAK.split(text))
    assert refused
    assert all(1 <= mistake.line <= last and mistake.message for mistake in refused), (refused, last)


# Whatever the text, patches or mistakes


@given(st.text())
@settings(deadline=None, max_examples=300)
def test_any_text_gives_patches_or_mistakes(text: str) -> None:
    patches_or_mistakes(text)


NAMES = st.one_of(
    st.sampled_from(
        sorted({*Patch.__struct_fields__, *Target.__struct_fields__, *Hit.__struct_fields__, "issue", "fix"})
    ),
    st.text(max_size=10),
)
YAML_PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            ["- ", "\n", "  ", ": ", "&a ", "*a", "!!int ", "!!set ", "!!omap ", "!!bool ", "!!python/name:os ", "<<"]
        ),
        st.sampled_from(["{", "}", "[", "]", ", ", "? ", "|\n", ">-\n", "---", "...", "%", "'", '"', "=", "~", "0x"]),
        NAMES,
        st.text(max_size=5),
    ),
    max_size=40,
).map("".join)


@given(YAML_PIECES)
@settings(deadline=None, max_examples=500)
def test_any_pieces_of_yaml_give_patches_or_mistakes(text: str) -> None:
    patches_or_mistakes(text)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.dates(),
    st.binary(max_size=8),
    st.sampled_from([EXAMPLE.id, EXAMPLE.self_test, EXAMPLE.targets[0].wrapper, ">=0.11,<0.12", "crash", "trl.x"]),
)
STRUCTURES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=6)),
    max_leaves=20,
)


@given(STRUCTURES)
@settings(deadline=None, max_examples=300)
def test_any_structure_gives_patches_or_mistakes(structure: Any) -> None:
    patches_or_mistakes(yaml.safe_dump(structure))
    patches_or_mistakes(yaml.safe_dump([structure], allow_unicode=True))


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        if value:
            yield value
        for inner in list(value.values() if isinstance(value, dict) else value):
            yield from _containers(inner)


@st.composite
def mutated_entries(draw: st.DrawFn) -> str:
    entries = yaml.safe_load(ENTRY)
    for _ in range(draw(st.integers(1, 3))):
        container = draw(st.sampled_from(list(_containers(entries)) or [entries]))
        mutation = draw(st.sampled_from(["drop", "replace", "insert"]))
        if mutation == "insert" or not container:
            if isinstance(container, dict):
                container[draw(NAMES)] = draw(STRUCTURES)
            else:
                container.insert(draw(st.integers(0, len(container))), draw(STRUCTURES))
            continue
        keys = sorted(container) if isinstance(container, dict) else range(len(container))
        key = draw(st.sampled_from(keys))
        if mutation == "drop":
            del container[key]
        else:
            container[key] = draw(STRUCTURES)
    return yaml.safe_dump(entries, sort_keys=False)


@given(mutated_entries())
@settings(deadline=None, max_examples=500)
def test_a_mutated_entry_gives_patches_or_mistakes(text: str) -> None:
    patches_or_mistakes(text)


@given(
    st.sampled_from(["id", "revision", "title", "severity", "trl", "upstream", "why", "how", "targets", "self_test"])
)
def test_no_required_key_can_be_left_out(key: str) -> None:
    entries = yaml.safe_load(ENTRY)
    del entries[0][key]
    assert (1, f"the patch lacks {key!r}") in mistakes(yaml.safe_dump(entries, sort_keys=False))
