"""Which patches are selected, and with which options, by arguments and environment variables."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from trl_hotfix.catalogue import names
from trl_hotfix.errors import SettingError, UnknownPatchError
from trl_hotfix.model import Option
from trl_hotfix.selection.selection import Selection

from helpers.patch_examples import IDS, KNOWN, PATCH, selection_of


def test_everything_is_selected_by_default() -> None:
    assert selection_of() == Selection(only=None, skip=frozenset())


def test_the_environment_selects() -> None:
    selection = selection_of(
        environment={"TRL_HOTFIX_ONLY": " some-patch ,third-patch,", "TRL_HOTFIX_SKIP": "third-patch"}
    )
    assert selection == Selection(only=frozenset({"some-patch", "third-patch"}), skip=frozenset({"third-patch"}))


def test_an_argument_overrides_the_environment() -> None:
    environment = {"TRL_HOTFIX_ONLY": "some-patch", "TRL_HOTFIX_SKIP": "third-patch"}
    selection = selection_of(only=["another-patch"], skip=["some-patch"], environment=environment)
    assert selection == Selection(only=frozenset({"another-patch"}), skip=frozenset({"some-patch"}))


def test_one_argument_keeps_the_other_variable() -> None:
    assert selection_of(only=["some-patch"], environment={"TRL_HOTFIX_SKIP": "third-patch"}).skip == {"third-patch"}


def test_an_empty_argument_overrides_the_environment() -> None:
    environment = {"TRL_HOTFIX_ONLY": "some-patch", "TRL_HOTFIX_SKIP": "third-patch"}
    assert selection_of(only=[], skip=[], environment=environment) == Selection(only=frozenset(), skip=frozenset())


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_is_ignored(value: str) -> None:
    assert selection_of(environment={"TRL_HOTFIX_ONLY": value, "TRL_HOTFIX_SKIP": value}) == Selection()


@pytest.mark.parametrize("value", [",", " , ,"])
def test_a_list_without_an_id_skips_nothing_and_is_no_selection(value: str) -> None:
    assert selection_of(environment={"TRL_HOTFIX_SKIP": value}) == Selection()
    with pytest.raises(SettingError, match=r"TRL_HOTFIX_ONLY=.* names no patch: unset it if you mean all"):
        selection_of(environment={"TRL_HOTFIX_ONLY": value})


def test_an_overridden_variable_is_not_read() -> None:
    assert selection_of(only=["some-patch"], environment={"TRL_HOTFIX_ONLY": "nonsense"}).only == {"some-patch"}


def test_a_single_id_needs_no_list() -> None:
    assert selection_of(only="some-patch", skip="third-patch") == Selection(
        frozenset({"some-patch"}), frozenset({"third-patch"})
    )


def test_any_iterable_of_ids_is_accepted() -> None:
    assert selection_of(only=(patch_id for patch_id in IDS)).only == set(IDS)


def test_an_unknown_id_gets_a_suggestion() -> None:
    with pytest.raises(UnknownPatchError, match=r"unknown patch in only=: 'some-pach'; did you mean 'some-patch'\?"):
        selection_of(only=["some-pach"])


def test_an_unknown_id_in_a_variable_names_the_variable() -> None:
    with pytest.raises(UnknownPatchError, match=r"TRL_HOTFIX_SKIP: 'anothr-patch'; did you mean 'another-patch'\?"):
        selection_of(environment={"TRL_HOTFIX_SKIP": "some-patch,anothr-patch"})


def test_every_unknown_id_is_named() -> None:
    with pytest.raises(UnknownPatchError) as caught:
        selection_of(skip=["zzzz", "some-patch", "qqqq"])
    assert caught.value.unknown == ("qqqq", "zzzz")


def test_an_id_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(UnknownPatchError, match=r"skip=: 'zzzz'\. "):
        selection_of(skip=["zzzz"])


OVER = Option({"sequence": "the paper's", "global": "every token"}, "sequence")
WITH_OPTION = replace(PATCH, options={"over": OVER})
OTHERS = (WITH_OPTION, *KNOWN[1:])


# Options


def test_an_option_has_its_default_unless_chosen() -> None:
    assert selection_of(known=OTHERS).options_of(WITH_OPTION) == {"over": "sequence"}
    chosen = selection_of(known=OTHERS, options={"some-patch": {"over": "global"}})
    assert chosen.options_of(WITH_OPTION) == {"over": "global"}
    assert chosen.options_of(KNOWN[1]) == {}


def test_options_are_read_from_the_environment() -> None:
    environment = {"TRL_HOTFIX_OPTIONS": " some-patch.over = global ,"}
    assert selection_of(environment=environment, known=OTHERS).options_of(WITH_OPTION) == {"over": "global"}
    argument = {"some-patch": {"over": "sequence"}}
    assert selection_of(environment=environment, known=OTHERS, options=argument).options == argument


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"some-pach": {}}, UnknownPatchError, r"unknown patch in options=: 'some-pach'; did you mean 'some-patch'\?"),
        ({"some-patch": {"ovr": "global"}}, SettingError, r"has no option 'ovr'; did you mean 'over'\?"),
        ({"some-patch": {"zzz": "global"}}, SettingError, "has no option 'zzz'; it has over"),
        ({"third-patch": {"over": "global"}}, SettingError, "third-patch has no option 'over'; it has no options"),
        ({"some-patch": {"over": "globl"}}, SettingError, "is 'globl', expected one of sequence, global; did you mean"),
        ({"some-patch": {"over": 3}}, SettingError, "is 3, expected one of sequence, global"),
    ],
)
def test_an_unknown_option_or_choice_is_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        selection_of(known=OTHERS, options=options)


@pytest.mark.parametrize("value", ["some-patch", "some-patch.over", "some-patch=global"])
def test_options_in_the_environment_have_one_form(value: str) -> None:
    with pytest.raises(SettingError, match=r"TRL_HOTFIX_OPTIONS: expected id\.option=choice, found"):
        selection_of(environment={"TRL_HOTFIX_OPTIONS": value}, known=OTHERS)


def test_an_option_has_one_choice() -> None:
    value = "some-patch.over=global,some-patch.over=sequence"
    with pytest.raises(SettingError, match=r"'some-patch.over' is there twice"):
        selection_of(environment={"TRL_HOTFIX_OPTIONS": value}, known=OTHERS)
    same = {"TRL_HOTFIX_OPTIONS": "some-patch.over=global,some-patch.over=global"}
    assert selection_of(environment=same, known=OTHERS).options == {"some-patch": {"over": "global"}}


# Ids that a patch had before

RENAMED = (replace(WITH_OPTION, formerly=("old-patch", "oldest-patch")), *KNOWN[1:])


def test_a_former_id_means_the_present_one() -> None:
    environment = {"TRL_HOTFIX_ONLY": "old-patch, third-patch", "TRL_HOTFIX_OPTIONS": "oldest-patch.over=global"}
    selection = selection_of(environment=environment, known=RENAMED)
    assert selection.only == {"some-patch", "third-patch"}
    assert selection.options == {"some-patch": {"over": "global"}}
    assert selection_of(skip=["oldest-patch"], known=RENAMED).skip == {"some-patch"}


def test_a_former_id_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    names._mention.cache_clear()
    for _ in range(2):
        selection_of(skip=["old-patch", "third-patch"], known=RENAMED)
    assert [record.message for record in caplog.records] == ["old-patch is now called some-patch"]
    assert vars(caplog.records[0])["trl_hotfix"] == {
        "event": "renamed",
        "former": "old-patch",
        "patch": "some-patch",
    }


def test_two_names_of_a_patch_do_not_choose_twice() -> None:
    options = {"some-patch": {"over": "global"}, "old-patch": {"over": "sequence"}}
    with pytest.raises(SettingError, match=r"some-patch.over is there twice, as global and sequence"):
        selection_of(options=options, known=RENAMED)
