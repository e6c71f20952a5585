"""A finder of somebody else's that stands in front of ours does not make TRL_HOTFIX=1 or apply() a silent no-op."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers import sharing

if TYPE_CHECKING:
    from launched.environments import Environment

PATCH = "moe-aux-loss-lost-under-deepspeed"
TRAINER = "from trl import DPOTrainer; print(vars(DPOTrainer)['get_batch_loss_metrics'].__module__)\n"
ON = "trl_hotfix.patching.pickled\n"

PROXY = """
import importlib.machinery, sys

class InFront:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, path, target)

sys.meta_path.insert(0, InFront())
"""
"""It finds every module itself, so that no other finder is asked."""

OWN_LOADER = """
import importlib.machinery, sys

class Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, **more):
        return super().source_to_code(data, path, **more)

class InFront:
    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader = getattr(spec, "loader", None)
        if name.partition(".")[0] == "trl" and isinstance(loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
            return spec

sys.meta_path.insert(0, InFront())
"""
"""It changes the source of one package, as jaxtyping and typeguard do."""

ONE_LOADER = """
import importlib.machinery, importlib.util, sys

class InFront:
    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if name.partition(".")[0] == "trl" and spec is not None and spec.origin is not None:
            return importlib.util.spec_from_file_location(
                name, spec.origin, loader=self, submodule_search_locations=spec.submodule_search_locations
            )

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        with open(module.__spec__.origin) as file:
            exec(compile(file.read(), module.__spec__.origin, "exec"), module.__dict__)

sys.meta_path.insert(0, InFront())
"""
"""It is the loader of all its modules, as that of pytest."""

BY_HAND = """
import importlib.machinery, importlib.util, sys
spec = importlib.machinery.PathFinder.find_spec("trl")
sys.modules["trl"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
"""No finder is asked for TRL at all."""

FINDERS = {"proxy": PROXY, "own loader": OWN_LOADER, "one loader": ONE_LOADER, "by hand": BY_HAND}


@pytest.mark.parametrize("in_front", sharing.heavy(list(FINDERS), smoke=["proxy", "own loader"]))
@pytest.mark.parametrize("value", sharing.heavy(["1", "strict-all"], smoke=["strict-all"]))
def test_the_variable_works_behind_another_finder(installed: Environment, in_front: str, value: str) -> None:
    process = installed.code(FINDERS[in_front] + TRAINER, TRL_HOTFIX=value, TRL_HOTFIX_ONLY=PATCH)
    assert process.stdout == ON, process.stderr
    assert "1 repair on for DPO" in process.stderr


@pytest.mark.parametrize("in_front", sharing.heavy(list(FINDERS), smoke=["one loader", "by hand"]))
def test_apply_works_behind_another_finder(installed: Environment, in_front: str) -> None:
    code = f"import trl_hotfix; trl_hotfix.apply(only=[{PATCH!r}], strict='all')\n{FINDERS[in_front]}{TRAINER}"
    process = installed.code(code)
    assert process.stdout == ON, process.stderr
    assert "1 repair on for DPO" in process.stderr


@pytest.mark.parametrize("in_front", sharing.heavy(list(FINDERS), smoke=["proxy", "by hand"]))
def test_strict_raises_behind_another_finder(installed: Environment, in_front: str) -> None:
    """What cannot be on ends the import of the trainer."""
    broken = f"""
import trl_hotfix.patches.preference.{PATCH.replace("-", "_")} as patch
from trl_hotfix.model import Outcome, Verdict
from trl_hotfix.catalogue import loading
(name,) = (declared.self_test for declared in loading.load() if declared.id == {PATCH!r})

def fixed(module):
    return Outcome(Verdict.FIXED)

fixed.__module__ = patch.__name__
setattr(patch, name, fixed)
"""
    code = FINDERS[in_front] + broken + TRAINER
    process = installed.code(code, TRL_HOTFIX="strict-all", TRL_HOTFIX_ONLY=PATCH)
    assert (process.returncode, process.stdout) == (1, ""), process.stderr
    assert f"NotAppliedError: strict mode: a patch that should be on cannot be:\n  {PATCH}: " in process.stderr
    assert "skipped (not-reproduced)" in process.stderr


def test_modules_that_were_loaded_past_the_hook_are_named_and_then_patched(installed: Environment) -> None:
    module = "trl.trainer.dpo_trainer"
    code = f"""
import importlib.util, sys, trl, trl_hotfix
from trl_hotfix.patching.engine import ENGINE
trl_hotfix.apply(only=[{PATCH!r}])
print(ENGINE.overlooked())
spec = importlib.util.find_spec("trl.trainer")
path = spec.submodule_search_locations[0] + "/dpo_trainer.py"
import trl.trainer
spec = importlib.util.spec_from_file_location("{module}", path)
sys.modules["{module}"] = made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)
print(ENGINE.overlooked())
print(trl_hotfix.status()[{PATCH!r}].state.value, ENGINE.overlooked())
"""
    process = installed.code(code)
    assert process.stdout.splitlines() == ["[]", f"['{module}']", "applied []"], process.stderr
