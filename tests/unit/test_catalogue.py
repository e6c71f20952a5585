from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import trl_hotfix.patches
from trl_hotfix.catalogue import loading, modules, parsing
from trl_hotfix.errors import CatalogueError, Mistake
from trl_hotfix.model import Hit, Patch, Severity, Target

SHIPPED = loading.load()
IDS = [patch.id for patch in SHIPPED]
MODULES = sorted(Path(trl_hotfix.patches.__file__).parent.glob("*.py"))

# The id and the functions are those of a shipped patch, since the catalogue looks for them in its module.
EXAMPLE = SHIPPED[0]
ENTRY = f"""\
- id: {EXAMPLE.id}
  revision: 1
  title: A title
  severity: crash
  trl: ">=0.11.0,<0.12.0"
  upstream: {{issue: 1, fix: [2, 3], fixed_in: "0.12.0"}}
  why: because
  how: so
  targets:
    - module: trl.trainer.dpo_trainer
      attribute: DPOTrainer.get_batch_loss_metrics
      wrapper: {EXAMPLE.targets[0].wrapper}
  self_test: {EXAMPLE.self_test}
"""
LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")


def with_lines(changes: Mapping[int, str | None]) -> str:
    """The example entry with lines replaced, or left out where the new line is None."""
    lines = [changes.get(number, line) for number, line in enumerate(ENTRY.splitlines(), start=1)]
    return "".join(f"{line}\n" for line in lines if line is not None)


def mistakes(text: str) -> list[tuple[int, str]]:
    with pytest.raises(CatalogueError) as caught:
        parsing.parse(text, "patches.yaml")
    return [(mistake.line, mistake.message) for mistake in caught.value.mistakes]


def the_mistake(text: str) -> tuple[int, str]:
    refused = mistakes(text)
    assert len(refused) == 1, refused
    return refused[0]


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


# The shipped catalogue


def test_the_shipped_catalogue_loads() -> None:
    assert SHIPPED
    assert all(isinstance(patch, Patch) for patch in SHIPPED)


def test_the_shipped_catalogue_is_read_once() -> None:
    assert loading.load() is loading.load()


def test_every_id_has_a_module() -> None:
    assert {modules.module_of(patch_id) for patch_id in IDS} <= {f"trl_hotfix.patches.{path.stem}" for path in MODULES}


def test_every_module_has_an_id() -> None:
    stems = {path.stem for path in MODULES} - {"__init__"}
    assert stems == {patch_id.replace("-", "_") for patch_id in IDS}


@pytest.mark.parametrize("patch", SHIPPED, ids=IDS)
def test_every_public_function_of_a_patch_module_is_named_in_the_catalogue(patch: Patch) -> None:
    module = import_module(modules.module_of(patch.id))
    defined = {
        name
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    assert defined == {patch.self_test, *(target.wrapper for target in patch.targets)}


@pytest.mark.parametrize("patch", SHIPPED, ids=IDS)
def test_every_function_that_the_catalogue_names_is_defined_at_the_top_of_its_module(patch: Patch) -> None:
    source = Path(import_module(modules.module_of(patch.id)).__file__ or "").read_text(encoding="utf-8")
    defined = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert {patch.self_test, *(target.wrapper for target in patch.targets)} <= defined


@pytest.mark.parametrize("patch", SHIPPED, ids=IDS)
def test_function_of_gives_the_functions_of_a_patch(patch: Patch) -> None:
    for name in (patch.self_test, *(target.wrapper for target in patch.targets)):
        function = modules.function_of(patch, name, {})
        assert getattr(function, "func", function).__name__ == name


# The example, and what is right about it


def test_the_example_is_without_mistakes() -> None:
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


# Mistakes


def test_text_that_is_not_yaml_is_named_with_its_line() -> None:
    line, message = the_mistake(with_lines({6: "  upstream: {issue: 1"}))
    assert line in (6, 7)
    assert message.startswith("not YAML: ")


def test_a_control_character_is_a_mistake() -> None:
    assert the_mistake("- \x00")[1].startswith("not YAML: ")


def test_a_second_document_is_named_with_its_line() -> None:
    assert the_mistake("[]\n---\n[]\n")[0] == 2


def test_an_unknown_key_is_named_with_the_one_that_was_meant() -> None:
    line, message = the_mistake(ENTRY + "  requries: {}\n")
    assert line == 14
    assert message == "unknown key 'requries' in a patch; did you mean 'requires'?"


def test_an_unknown_key_of_a_target_is_named_with_its_line() -> None:
    line, message = the_mistake(with_lines({12: f"      wrapper: {EXAMPLE.targets[0].wrapper}\n      tracde: true"}))
    assert line == 13
    assert message == "unknown key 'tracde' in a target; did you mean 'traced'?"


def test_an_unknown_key_of_upstream_is_named_with_its_line() -> None:
    line, message = the_mistake(with_lines({6: "  upstream:\n    fixed: 3"}))
    assert line == 7
    assert message == "unknown key 'fixed' in an upstream; did you mean 'fixed_in'?"


def test_a_key_that_is_like_no_other_gets_no_suggestion() -> None:
    assert the_mistake(ENTRY + "  zzz: 1\n") == (14, "unknown key 'zzz' in a patch")


def test_a_bad_range_is_named_with_its_line() -> None:
    line, message = the_mistake(with_lines({5: '  trl: "0.11.0 and later"'}))
    assert line == 5
    assert message.startswith("trl: '0.11.0 and later' is not a PEP 440 range")


def test_a_bad_range_of_a_target_is_named_with_its_line() -> None:
    line, message = the_mistake(with_lines({12: ENTRY.splitlines()[11] + '\n      trl: "~0.11"'}))
    assert line == 13
    assert message.startswith("trl: '~0.11' is not a PEP 440 range")


def test_a_bad_range_of_a_requirement_is_named_with_its_line() -> None:
    line, message = the_mistake(ENTRY + '  requires:\n    torch: ">=2"\n    deepspeed: new\n')
    assert line == 16
    assert message.startswith("requires deepspeed: 'new' is not a PEP 440 range")


def test_a_version_without_quotes_is_a_number_and_the_remedy_is_said() -> None:
    line, message = the_mistake(with_lines({5: "  trl: 1.10"}))
    assert line == 5
    assert message.startswith("trl: ")
    assert "quotes" in message


def test_a_fixed_version_without_quotes_is_a_number_and_the_remedy_is_said() -> None:
    line, message = the_mistake(with_lines({6: "  upstream: {fixed_in: 1.10}"}))
    assert line == 6
    assert message.startswith("fixed_in: ")
    assert "quotes" in message


def test_a_fixed_version_that_is_none_is_a_mistake() -> None:
    assert the_mistake(with_lines({6: "  upstream: {fixed_in: soon}"})) == (6, "fixed_in: 'soon' is not a version")


def test_a_range_without_an_end_says_when_it_is_reviewed() -> None:
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
        "review_by: the range '>=0.11.0,<0.12.0' has an end, so nothing is to be reviewed",
    )


def test_a_bad_severity_is_named_with_the_choices() -> None:
    line, message = the_mistake(with_lines({4: "  severity: bad"}))
    assert line == 4
    assert message.startswith("severity: ")
    assert all(choice.value in message for choice in Severity)


def test_a_duplicate_id_is_named_with_both_lines() -> None:
    assert the_mistake(ENTRY + ENTRY) == (14, f"duplicate id {EXAMPLE.id!r}, first used on line 1")


def test_a_duplicate_key_is_named_with_both_lines() -> None:
    assert the_mistake(ENTRY + "  title: Another\n") == (14, "duplicate key 'title', first used on line 3")


@pytest.mark.parametrize(
    ("line", "key"), [(2, "revision"), (3, "title"), (4, "severity"), (5, "trl"), (7, "why"), (8, "how")]
)
def test_a_missing_key_is_named_with_the_line_of_its_entry(line: int, key: str) -> None:
    assert the_mistake(with_lines({line: None})) == (1, f"the patch lacks {key!r}")


def test_a_missing_key_of_a_target_is_named_with_the_line_of_the_target() -> None:
    assert the_mistake(with_lines({12: None})) == (10, "the target lacks 'wrapper'")


def test_a_missing_wrapper_function_is_named_with_the_one_that_was_meant() -> None:
    meant = EXAMPLE.targets[0].wrapper
    line, message = the_mistake(with_lines({12: f"      wrapper: {meant}x"}))
    assert line == 12
    assert message.startswith("wrapper: ")
    assert message.endswith(f"has no function '{meant}x'; did you mean {meant!r}?")


def test_a_missing_self_test_is_named_with_the_one_that_was_meant() -> None:
    line, message = the_mistake(with_lines({13: f"  self_test: {EXAMPLE.self_test}x"}))
    assert line == 13
    assert message.startswith("self_test: ")
    assert message.endswith(f"did you mean {EXAMPLE.self_test!r}?")


def test_a_function_that_the_module_only_imports_is_not_its_own() -> None:
    imported = next(
        name
        for name, value in vars(import_module(modules.module_of(EXAMPLE.id))).items()
        if isinstance(value, types.FunctionType) and value.__module__.startswith("trl_hotfix.authoring.")
    )
    line, message = the_mistake(with_lines({13: f"  self_test: {imported}"}))
    assert line == 13
    assert f"has no function {imported!r}" in message


def test_an_id_without_a_module_is_a_mistake() -> None:
    line, message = the_mistake(with_lines({1: "- id: no-such-patch"}))
    assert (line, message) == (1, "id 'no-such-patch' has no module trl_hotfix.patches.no_such_patch")


@pytest.mark.parametrize("bad", ["Upper-Case", "under_score", "'-'", "a--b", "../x", "a.b", "''"])
def test_an_id_is_lower_case_words(bad: str) -> None:
    line, message = the_mistake(with_lines({1: f"- id: {bad}"}))
    assert line == 1
    assert message.endswith("is not lower-case words joined by '-'")


def test_a_module_that_cannot_be_imported_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_on_import.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.setattr(trl_hotfix.patches, "__path__", [*trl_hotfix.patches.__path__, str(tmp_path)])
    line, message = the_mistake(with_lines({1: "- id: broken-on-import"}))
    assert line == 1
    assert "trl_hotfix.patches.broken_on_import cannot be imported" in message


def test_a_module_that_raises_on_import_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "raises_on_import.py").write_text("undefined_name\n")
    monkeypatch.setattr(trl_hotfix.patches, "__path__", [*trl_hotfix.patches.__path__, str(tmp_path)])
    line, message = the_mistake(with_lines({1: "- id: raises-on-import"}))
    assert line == 1
    assert "undefined_name" in message


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


def test_a_revision_starts_at_1() -> None:
    assert the_mistake(with_lines({2: "  revision: 0"})) == (2, "revision 0 is less than 1")


@pytest.mark.parametrize("revision", ["'1'", "1.5", "true", "null", "[1]", "one"])
def test_a_revision_is_a_whole_number(revision: str) -> None:
    line, message = the_mistake(with_lines({2: f"  revision: {revision}"}))
    assert line == 2
    assert message.startswith("revision: ")


def test_an_alias_is_refused() -> None:
    line, message = mistakes(with_lines({7: "  why: &text because", 8: "  how: *text"}))[0]
    assert line == 8
    assert "alias" in message


def test_an_alias_to_nothing_is_refused() -> None:
    line, message = the_mistake(with_lines({8: "  how: *text"}))
    assert line == 8
    assert message.startswith("an alias (*text)")


def test_an_alias_to_what_it_stands_in_is_refused() -> None:
    assert any("alias" in message for _, message in mistakes("&a [*a]"))


def test_a_merge_key_is_refused() -> None:
    assert any(line == 14 for line, _ in mistakes(ENTRY + "  <<: {default: off}\n"))


def test_a_key_that_is_not_text_is_a_mistake() -> None:
    line, message = the_mistake(ENTRY + "  on: 1\n")
    assert line == 14
    assert message.startswith("expected a name as the key")


@pytest.mark.parametrize(
    "value",
    [
        "!!python/name:os.system ''",
        "!!python/module:os ''",
        "!!python/object/apply:os.system ''",
        "!unknown x",
    ],
)
def test_a_tag_on_text_is_refused(value: str) -> None:
    refused = mistakes(with_lines({3: f"  title: {value}"}))
    assert any(line == 3 and message.startswith("a tag (") for line, message in refused)


def test_a_tag_that_calls_a_function_is_refused_and_calls_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    call = f"!!python/object/apply:os.mkdir [{json.dumps(str(folder))}]"
    refused = mistakes(with_lines({3: f"  title: {call}"}))
    assert {line for line, _ in refused} == {3}
    assert not folder.exists()


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.getcwd", "!!python/tuple", "!!set", "!unknown"])
def test_a_tag_on_a_list_is_refused(tag: str) -> None:
    assert 9 in [line for line, _ in mistakes(with_lines({9: f"  targets: {tag}"}))]


def test_a_tag_on_an_entry_is_refused() -> None:
    assert mistakes(ENTRY.replace("- id", "- !!python/object:os.PathLike\n  id"))


@pytest.mark.parametrize("value", ["!!bool maybe", "!!timestamp soon", "!!int ''", "!!float ''", "!!int x"])
def test_a_value_that_is_not_what_its_tag_says_is_a_mistake(value: str) -> None:
    assert 3 in [line for line, _ in mistakes(with_lines({3: f"  title: {value}"}))]


@pytest.mark.parametrize("value", ["!!pairs x", "!!seq x", "!!omap x", "!!map x"])
def test_text_with_the_tag_of_a_collection_is_a_mistake(value: str) -> None:
    assert {line for line, _ in mistakes(value)} == {1}


@pytest.mark.parametrize("text", ["", "\n\n", "# a comment\n", "---\n", "null"])
def test_an_empty_file_is_a_mistake(text: str) -> None:
    line, message = the_mistake(text)
    assert line <= 2
    assert message == "expected a list of patches, found nothing"


def test_a_mapping_instead_of_a_list_is_a_mistake() -> None:
    assert the_mistake("\npatches: []\n") == (2, "expected a list of patches, found a mapping")


def test_text_instead_of_a_list_is_a_mistake() -> None:
    assert the_mistake("nothing") == (1, "expected a list of patches, found text")


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


def test_no_targets_are_a_mistake() -> None:
    line, message = the_mistake(with_lines({9: "  targets: []", 10: None, 11: None, 12: None}))
    assert line == 9
    assert message.startswith("targets is empty")


def test_several_mistakes_are_all_named_and_sorted_by_line() -> None:
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


def test_mistakes_in_several_entries_are_all_named_and_sorted_by_line() -> None:
    text = "- more\n" + with_lines({4: "  severity: bad", 5: "  trl: 1.10"}) + with_lines({3: None, 8: "  hwo: so"})
    assert [line for line, _ in mistakes(text)] == [1, 5, 6, 15, 15, 15, 21]


def test_the_message_has_the_path_and_every_line() -> None:
    with pytest.raises(CatalogueError) as caught:
        parsing.parse(with_lines({2: "  revision: 0", 4: "  severity: bad"}) + "- more\n", "some/patches.yaml")
    message = str(caught.value)
    assert message.startswith("some/patches.yaml has 2 mistakes; no patch was applied:\n  line 4: ")
    assert "\n  line 14: " in message


def test_one_mistake_is_not_plural() -> None:
    with pytest.raises(CatalogueError, match="has 1 mistake; no patch was applied"):
        parsing.parse("", "patches.yaml")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"], ids=["missing", "not UTF-8"])
def test_a_file_that_cannot_be_read_is_a_mistake(
    content: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "patches.yaml"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(loading, "manifest", lambda: path)
    with pytest.raises(CatalogueError, match="cannot be read") as caught:
        loading.load.__wrapped__()
    assert caught.value.path == str(path)


def test_brackets_without_end_are_a_mistake_and_not_the_end_of_the_process() -> None:
    code = (
        "from trl_hotfix.catalogue import parsing\n"
        "from trl_hotfix.errors import CatalogueError\n"
        "try:\n    parsing.parse('[' * 100_000, 'patches.yaml')\n"
        "except CatalogueError:\n    print('refused')\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout.strip()) == (0, "refused")


# Whatever the text, patches or mistakes

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
NAMES = st.one_of(
    st.sampled_from(
        sorted({*Patch.__struct_fields__, *Target.__struct_fields__, *Hit.__struct_fields__, "issue", "fix"})
    ),
    st.text(max_size=10),
)
STRUCTURES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=6)),
    max_leaves=20,
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


@given(st.text())
@settings(deadline=None, max_examples=300)
def test_any_text_gives_patches_or_mistakes(text: str) -> None:
    patches_or_mistakes(text)


@given(YAML_PIECES)
@settings(deadline=None, max_examples=500)
def test_any_pieces_of_yaml_give_patches_or_mistakes(text: str) -> None:
    patches_or_mistakes(text)


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


# Options

WITH_OPTION = next(patch for patch in SHIPPED if patch.options)
OPTIONS = """\
  options:
    over:
      choices: {sequence: as in the paper, global: every token}
      default: sequence
"""


def with_options(options: str) -> str:
    entry = ENTRY.replace(EXAMPLE.id, WITH_OPTION.id).replace(EXAMPLE.self_test, WITH_OPTION.self_test)
    return entry.replace(EXAMPLE.targets[0].wrapper, WITH_OPTION.targets[0].wrapper) + options


def test_an_option_has_choices_with_their_meaning_and_a_default() -> None:
    (patch,) = parsing.parse(with_options(OPTIONS), "patches.yaml")
    option = patch.options["over"]
    assert option.choices == {"sequence": "as in the paper", "global": "every token"}
    assert option.default == "sequence"


@pytest.mark.parametrize(
    ("right", "wrong", "line", "message"),
    [
        (
            "default: sequence",
            "default: sequenc",
            17,
            "default 'sequenc' is none of the choices; did you mean 'sequence'?",
        ),
        ("global:", "Global|x:", 16, "'Global|x' is not lower-case words joined by '-' or '_'"),
        (", global: every token", "", 16, "the option 'over' has 1 choices, expected two or more"),
        ("      default: sequence\n", "", 16, "the option lacks 'default'"),
        ("default:", "defalt: x\n      default:", 17, "unknown key 'defalt' in an option; did you mean 'default'?"),
        ("{sequence: as in the paper, global: every token}", "[sequence, global]", 16, "choices: Expected"),
    ],
)
def test_a_mistake_in_an_option_is_told_with_its_line(right: str, wrong: str, line: int, message: str) -> None:
    refused = the_mistake(with_options(OPTIONS.replace(right, wrong)))
    assert (refused[0], refused[1][: len(message)]) == (line, message)


def test_functions_take_options_if_and_only_if_the_entry_declares_them() -> None:
    messages = [message for _, message in mistakes(with_options(""))]
    assert len(messages) == 2
    assert all(message.endswith("takes options, and the entry declares none") for message in messages)
    messages = [message for _, message in mistakes(ENTRY + OPTIONS)]
    assert len(messages) == 2
    assert all(message.endswith("does not take options, which the entry declares") for message in messages)


# What a bug needs

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


def test_hits_say_what_a_bug_needs() -> None:
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
def test_a_mistake_in_a_hit_is_told_with_its_line(right: str, wrong: str, line: int, message: str) -> None:
    assert right in HITS
    refused = the_mistake(ENTRY + HITS.replace(right, wrong, 1))
    assert (refused[0], refused[1][: len(message)]) == (line, message)
