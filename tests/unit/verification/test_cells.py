"""The verdict of a patch on one release, where the wrapper or the self-test is broken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from trl_hotfix.catalogue import loading
from trl_hotfix.verification import cells

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


MODULE = "module_of_a_target"


def write_module(name: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)


def verdict_where(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, inside: bool) -> tuple[str, str]:
    """Return the verdict on a module with this text, and the reason."""
    write_module(MODULE, text, folder, monkeypatch)
    (patch,) = (patch for patch in loading.load() if patch.id == ID)
    cell = cells.Cell(ID, 1, "1.16.0", cells.CellVerdict.ABSENT)
    verdict, why = cells._verify_module(patch, MODULE, inside=inside, cell=cell)
    return verdict.value, why


@pytest.mark.parametrize("inside", [True, False])
def test_a_module_is_absent_where_a_library_lacks_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, inside: bool
) -> None:
    verdict, why = verdict_where("from json import no_such_name", tmp_path, monkeypatch, inside=inside)
    assert verdict == "absent"
    assert why.startswith(f"{MODULE} cannot be imported here: cannot import name 'no_such_name' from 'json'")


@pytest.mark.parametrize(
    "text",
    [
        "import no_such_module",
        "raise ImportError('no')",
        "raise ImportError('no', name='trl.trainer.utils')",
        "from trl_hotfix.model import no_such_name",
        "raise RuntimeError('no')",
    ],
)
def test_any_other_failure_to_import_is_an_error_within_the_range(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((ImportError, RuntimeError)):
        verdict_where(text, tmp_path, monkeypatch, inside=True)


def test_a_module_that_lacks_another_module_is_absent_outside_of_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict_where("import no_such_module", tmp_path, monkeypatch, inside=False)[0] == "absent"


def test_targets_are_runnable_whose_modules_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"of_an_old_library": "from json import no_such_name", "of_this_library": ""}
    for name, text in texts.items():
        write_module(name, text, tmp_path, monkeypatch)
    (patch,) = (patch for patch in loading.load() if patch.id == ID)
    old, this = (replace(patch.targets[0], module=name) for name in texts)
    assert cells.runnable([old, this]) == (this,)


def test_a_module_that_fails_otherwise_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module("without_a_module", "import no_such_module", tmp_path, monkeypatch)
    (patch,) = (patch for patch in loading.load() if patch.id == ID)
    with pytest.raises(ModuleNotFoundError):
        cells.runnable([replace(patch.targets[0], module="without_a_module")])
