"""An entry against the module of its patch, and the shipped catalogue against all modules."""

from __future__ import annotations

import shutil
import types
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

import trl_hotfix.patches
from trl_hotfix.catalogue import loading, modules, parsing, shipped
from trl_hotfix.model import KnownBug, Patch

from helpers.example_entry import (
    ENTRY,
    EXAMPLE,
    OPTIONS,
    SHIPPED,
    mistakes,
    the_mistake,
    with_lines,
    with_options,
)

CHECKOUT = Path(__file__).parents[3]


def test_an_id_without_a_module_is_a_mistake() -> None:
    line, message = the_mistake(with_lines({1: "- id: no-such-patch"}))
    assert (line, message) == (1, "id 'no-such-patch' has no module trl_hotfix.patches.no_such_patch")


def test_an_import_error_of_a_module_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_a_missing_wrapper_gets_a_suggestion() -> None:
    meant = EXAMPLE.targets[0].wrapper
    line, message = the_mistake(with_lines({12: f"      wrapper: {meant}x"}))
    assert line == 12
    assert message.startswith("wrapper: ")
    assert message.endswith(f"has no function '{meant}x'; did you mean {meant!r}?")


def test_a_missing_self_test_gets_a_suggestion() -> None:
    line, message = the_mistake(with_lines({13: f"  self_test: {EXAMPLE.self_test}x"}))
    assert line == 13
    assert message.startswith("self_test: ")
    assert message.endswith(f"did you mean {EXAMPLE.self_test!r}?")


def test_an_imported_function_does_not_belong_to_the_module() -> None:
    imported = next(
        name
        for name, value in vars(import_module(modules.module_of(EXAMPLE.id))).items()
        if isinstance(value, types.FunctionType) and value.__module__.startswith("trl_hotfix.authoring.")
    )
    line, message = the_mistake(with_lines({13: f"  self_test: {imported}"}))
    assert line == 13
    assert f"has no function {imported!r}" in message


def test_functions_take_options_only_if_they_are_declared() -> None:
    messages = [message for _, message in mistakes(with_options(""))]
    assert len(messages) == 2
    assert all(message.endswith("takes options, and the entry declares none") for message in messages)
    messages = [message for _, message in mistakes(ENTRY + OPTIONS)]
    assert len(messages) == 2
    assert all(message.endswith("does not take options, which the entry declares") for message in messages)


# The shipped catalogue


def test_the_shipped_catalogue_agrees_with_the_modules_and_is_what_a_wheel_has() -> None:
    files = shipped.files(CHECKOUT)
    assert msgspec.json.decode(files["patches.json"], type=tuple[Patch, ...]) == SHIPPED
    assert msgspec.json.decode(files["known.json"], type=tuple[KnownBug, ...]) == loading.without_repair()


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("patches.yaml", "known.yaml"):
        shutil.copy(CHECKOUT / name, tmp_path)
    monkeypatch.setattr(shipped, "checkout", lambda: tmp_path)
    return tmp_path


def test_the_check_writes_nothing_unless_it_is_given_a_folder(copy: Path, tmp_path: Path) -> None:
    before = sorted(copy.iterdir())
    assert shipped.main([]) is None
    assert sorted(copy.iterdir()) == before
    assert shipped.main([str(tmp_path)]) is None
    assert {name: (tmp_path / name).read_bytes() for name in shipped.files(copy)} == shipped.files(copy)


def test_the_check_names_every_mistake_and_writes_nothing(copy: Path) -> None:
    (copy / "patches.yaml").write_text(with_lines({12: "      wrapper: nothing", 13: "  self_test: no_test"}))
    message = shipped.main([str(copy)])
    assert message is not None
    assert message.startswith(f"{copy / 'patches.yaml'} has 2 mistakes")
    assert "line 12: wrapper: " in message
    assert "line 13: self_test: " in message
    assert not (copy / "patches.json").exists()


def test_an_installed_package_has_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "checkout", lambda: None)
    assert shipped.main([]) == "this is an installed package: it has no patches.yaml to check"


def test_without_the_modules_no_function_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is imported")

    monkeypatch.setattr("trl_hotfix.catalogue.functions.import_module", refuse)
    (patch,) = parsing.parse(with_lines({13: "  self_test: no_test"}), "patches.yaml", modules=False)
    assert patch.self_test == "no_test"
    line, message = the_mistake(ENTRY)
    assert line == 1
    assert message.endswith(f"AssertionError: {modules.module_of(EXAMPLE.id)} is imported")
