"""The patches that are on before a script calls anything."""

from __future__ import annotations

import subprocess
import sys


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
