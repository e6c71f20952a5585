"""A patch in one module: its journal, and the sites of the classes that a reload has replaced."""

from __future__ import annotations

import gc
import weakref

from trl_hotfix.model import Decision, Reason, State
from trl_hotfix.patching.breaker import Breaker
from trl_hotfix.patching.module_patch import ModulePatch

from helpers.patch_examples import patch
from helpers.sample_trainers import site_of

PATCH = patch()


def module_patch_of() -> ModulePatch:
    return ModulePatch(PATCH, "trl.made_up_one", (), Breaker("some-patch"))


def test_the_journal_has_a_line_for_each_decision() -> None:
    module_patch = module_patch_of()
    module_patch.note()
    module_patch.decision = Decision(State.FAILED, Reason.SELF_TEST_ERROR, {"error": "ValueError: x"})
    module_patch.note()
    first, second = module_patch.journal
    assert first == "some-patch: trl.made_up_one: pending (not-imported)"
    assert second.startswith("some-patch: trl.made_up_one: failed (self-test-error)")
    assert "ValueError: x" in second


def test_two_module_patches_share_no_list() -> None:
    first, second = module_patch_of(), module_patch_of()
    for name in ("sites", "before_reload", "journal"):
        assert getattr(first, name) is not getattr(second, name)


def test_the_sites_before_a_reload_are_those_that_still_exist() -> None:
    module_patch = module_patch_of()
    current, held, gone = (site_of("method") for _ in range(3))
    module_patch.sites = [current]
    module_patch.before_reload = [weakref.ref(held), weakref.ref(gone)]
    assert module_patch.every_site() == [current, held, gone]
    del gone
    gc.collect()
    assert module_patch.replaced_sites() == [held]
    assert module_patch.every_site() == [current, held]
    assert len(module_patch.before_reload) == 1
