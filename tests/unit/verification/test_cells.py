"""The verdict of a patch on one release, where the wrapper or the self-test is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from trl_hotfix.catalogue import loading

from helpers.command_line import ID, run


def test_a_wrapper_without_effect_is_unrepaired_with_exit_1(package: Path) -> None:
    module = package / "patches" / "preference" / "moe_aux_loss_lost_under_deepspeed.py"
    repair = "call.with_(model=with_config(model, plain.config))()"
    assert repair in module.read_text()
    module.write_text(module.read_text().replace(repair, "call()"))
    process = run("--verify", ID, PYTHONPATH=str(package.parent))
    assert process.returncode == 1, process.stderr
    assert "unrepaired" in process.stdout


@pytest.mark.needs_trl
def test_a_self_test_that_ends_the_process_is_named(package: Path) -> None:
    module = package / "patches" / "preference" / "moe_aux_loss_lost_under_deepspeed.py"
    text = module.read_text()
    self_test = next(patch.self_test for patch in loading.load() if patch.id == ID)
    start = text.index(f"def {self_test}(")
    body = text.index('"""', text.index('"""', start) + 3) + 3
    module.write_text(f"{text[:body]}\n    import os\n\n    os._exit(9)\n{text[body:]}")
    process = run("verify", ID, PYTHONPATH=str(package.parent))
    assert process.returncode == 2
    assert f"ended with exit code 9; {ID} was next" in process.stderr
