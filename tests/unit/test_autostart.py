"""What a start does before a script calls anything: the patches that are on, and the settings that stop it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from trl_hotfix import autostart
from trl_hotfix.catalogue import loading
from trl_hotfix.errors import DamagedError, UnknownPatchError


def test_apply_narrows_the_selection_of_autostart() -> None:
    selected, unselected = "moe-aux-loss-lost-under-deepspeed", "dpo-eval-reference-from-trained-policy"
    code = (
        "import os; os.environ['TRL_HOTFIX'] = '1'\nfrom trl_hotfix import autostart, apply, status\n"
        f"autostart.start(); before = status()[{unselected!r}].state.value\n"
        f"apply(only=[{selected!r}]); import trl.trainer.dpo_trainer\n"
        f"print(before, status()[{selected!r}].state.value, status()[{unselected!r}].state.value)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.splitlines()[-1:] == ["pending applied disabled"], process.stderr


def test_an_error_of_ours_is_no_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The installation is damaged: TRL is imported unpatched, but for strict mode."""
    monkeypatch.setattr(loading, "load", raising(DamagedError("patches.json", OSError("gone"))))
    monkeypatch.setenv("TRL_HOTFIX", "1")
    autostart.apply_now()
    assert capsys.readouterr().err.startswith("trl_hotfix: WARNING: TRL stays unpatched: DamagedError: ")
    monkeypatch.setenv("TRL_HOTFIX", "strict")
    with pytest.raises(DamagedError):
        autostart.apply_now()


@pytest.mark.parametrize("value", ["1", "strict", "observe"])
def test_a_wrong_setting_is_raised_in_every_mode(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("TRL_HOTFIX", value)
    monkeypatch.setenv("TRL_HOTFIX_SKIP", "nonsense")
    with pytest.raises(UnknownPatchError, match=r"in TRL_HOTFIX_SKIP: 'nonsense'.*\ntrl is not imported"):
        autostart.apply_now()


def raising(error: Exception) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function
