"""The module patches of an engine: which thread works on one, and what an interruption or a request leaves."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from trl_hotfix.import_hooks import FINDER
from trl_hotfix.model import Decision, Patch, Reason, State, Target
from trl_hotfix.patching.module_patch import ModulePatch
from trl_hotfix.patching.registry import LONGEST_JOURNAL, Registry

from helpers.patch_examples import patch
from helpers.sample_trainers import RAW, Trainer, layer, site_of

pytestmark = pytest.mark.usefixtures("sample_trainers_restored")

TRL = "0.11.4"
MODULES = ("trl.made_up_one", "trl.made_up_two")
ON_TWO_MODULES = patch(targets=tuple(Target(module, "Trainer.method", "wrapper") for module in MODULES))
APPLIED = Decision(State.APPLIED, Reason.PROVEN)


@pytest.fixture
def registry() -> Iterator[Registry]:
    yield Registry()
    for module in MODULES:
        FINDER.forget(module)


def first_of(registry: Registry, declared: Patch = ON_TWO_MODULES) -> ModulePatch:
    return next(registry.waiting(declared, TRL, {}))


def put_on(registry: Registry) -> ModulePatch:
    """Return a module patch that is on the ``method`` of the sample trainer, as after its import."""
    module_patch = first_of(registry)
    with ExitStack() as undo:
        assert registry.claim(module_patch, undo)
        module_patch.sites = [site_of("method")]
        module_patch.sites[0].put_on(layer(module_patch.patch.id))
        assert registry.record_decision(module_patch, APPLIED)
        undo.pop_all()
    return module_patch


def test_a_patch_waits_for_each_module_of_its_targets(registry: Registry) -> None:
    waiting = list(registry.waiting(ON_TWO_MODULES, TRL, {"over": "all"}))
    assert [module_patch.key for module_patch in waiting] == [("some-patch", module) for module in MODULES]
    assert [module_patch.options for module_patch in waiting] == [{"over": "all"}] * 2
    repeated = list(registry.waiting(ON_TWO_MODULES, TRL, {}))
    assert all(before is after for before, after in zip(waiting, repeated, strict=True))
    assert registry.all() == registry.of("some-patch") == waiting
    assert registry.of("another-patch") == []


def test_only_the_targets_of_the_release_are_waited_for(registry: Registry) -> None:
    first, second = ON_TWO_MODULES.targets
    narrowed = patch(targets=(Target(first.module, first.attribute, "wrapper", trl="==0.11.0"), second))
    assert [module_patch.module for module_patch in registry.waiting(narrowed, TRL, {})] == [second.module]


def test_a_reverted_patch_waits_again_with_its_journal(registry: Registry) -> None:
    module_patch = put_on(registry)
    assert module_patch not in list(registry.waiting(ON_TWO_MODULES, TRL, {}))
    registry.take_off(module_patch)
    renewed = first_of(registry)
    assert renewed is not module_patch
    assert [line.rpartition(": ")[2] for line in renewed.journal] == ["applied (proven)", "reverted (by-request)"]


def test_two_threads_never_work_on_the_same_module_patch(registry: Registry) -> None:
    module_patch = first_of(registry)
    with ExitStack() as first_thread, ExitStack() as second_thread:
        assert registry.claim(module_patch, first_thread)
        assert not registry.claim(module_patch, second_thread)
        registry.record_decision(module_patch, APPLIED)
        # The module may have been reloaded since, so an applied one is worked on again.
        assert registry.claim(module_patch, second_thread)
        first_thread.pop_all()


def test_a_patch_that_failed_is_not_worked_on_again(registry: Registry) -> None:
    module_patch = first_of(registry)
    registry.record_decision(module_patch, Decision(State.FAILED, Reason.SELF_TEST))
    with ExitStack() as undo:
        assert not registry.claim(module_patch, undo)


def test_an_interrupted_patch_is_off_and_waits_again(registry: Registry) -> None:
    module_patch = first_of(registry)

    def interrupted_import() -> None:
        with ExitStack() as undo:
            registry.claim(module_patch, undo)
            module_patch.sites = [site_of("method")]
            module_patch.sites[0].put_on(layer(module_patch.patch.id))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_import()
    assert vars(Trainer)["method"] is RAW["method"]
    assert module_patch.decision == Decision(State.PENDING, Reason.NOT_IMPORTED)
    with ExitStack() as undo:
        assert registry.claim(module_patch, undo)


def test_a_request_during_the_work_takes_the_patch_off_afterwards(registry: Registry) -> None:
    """Taking it off at once would wait for the thread that imports the module, possibly for ever."""
    module_patch = first_of(registry)
    with ExitStack() as undo:
        registry.claim(module_patch, undo)
        module_patch.sites = [site_of("method")]
        module_patch.sites[0].put_on(layer(module_patch.patch.id))
        registry.take_off(module_patch)
        assert module_patch.cancel_requested
        assert vars(Trainer)["method"] is not RAW["method"]
        assert not registry.record_decision(module_patch, APPLIED)
        undo.pop_all()
    assert vars(Trainer)["method"] is RAW["method"]
    assert module_patch.decision == Decision(State.REVERTED, Reason.BY_REQUEST)


def test_a_patch_beneath_other_code_is_kept_and_named(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    module_patch = put_on(registry)

    def of_another_library(self: Trainer, x: int) -> int:
        return x

    Trainer.method = of_another_library  # type: ignore[method-assign,assignment]
    registry.drop([module_patch])
    assert registry.all()[0] is module_patch
    assert (module_patch.decision.state, module_patch.decision.reason) == (State.DISPLACED, Reason.REPLACED)
    assert "of_another_library" in module_patch.decision.evidence["by"]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.startswith("some-patch cannot be taken off: ")
    assert "of_another_library" in warning


def test_a_dropped_patch_is_off_and_forgotten(registry: Registry) -> None:
    module_patch = put_on(registry)
    registry.drop([module_patch])
    assert vars(Trainer)["method"] is RAW["method"]
    assert module_patch not in registry.all()


def test_a_module_is_watched_until_its_last_patch_is_off(registry: Registry) -> None:
    module_patch = first_of(registry)
    other = first_of(registry, patch(id="another-patch", targets=ON_TWO_MODULES.targets))
    FINDER.when_imported(module_patch.module, lambda module: None)
    registry.take_off(module_patch)
    assert module_patch.module in FINDER._imports
    registry.take_off(other)
    assert module_patch.module not in FINDER._imports
    assert module_patch.module not in sys.modules


@pytest.mark.parametrize(
    ("decision", "level", "expected"),
    [
        (Decision(State.APPLIED, Reason.PROVEN), None, None),
        (Decision(State.FAILED, Reason.SELF_TEST), logging.WARNING, "some-patch (r1) is NOT on: failed (self-test)"),
        (Decision(State.SKIPPED, Reason.ALREADY_FIXED), None, None),
    ],
    ids=lambda value: value.state.value if isinstance(value, Decision) else "",
)
def test_a_new_decision_is_logged_once(
    registry: Registry,
    caplog: pytest.LogCaptureFixture,
    decision: Decision,
    level: int | None,
    expected: str | None,
) -> None:
    caplog.set_level(logging.INFO, logger="trl_hotfix")
    module_patch = first_of(registry)
    assert registry.record_decision(module_patch, decision)
    assert registry.record_decision(module_patch, decision)
    assert [record.levelno for record in caplog.records] == ([level] if level else [])
    assert all(record.getMessage().startswith(str(expected)) for record in caplog.records)
    assert len(module_patch.journal) == 1


def test_the_full_log_has_each_repair_and_what_proves_it(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="trl_hotfix")
    assert registry.record_decision(first_of(registry), Decision(State.APPLIED, Reason.PROVEN, {"red": {"loss": 2}}))
    on, evidence = [(record.levelno, record.getMessage()) for record in caplog.records]
    # It must not read as if the bug were put on.
    assert on == (logging.DEBUG, "repair of some-patch is on (bug: A title)")
    assert evidence[1].startswith("some-patch (r1): applied in TRL ")
    assert evidence[1].endswith("; red: loss=2")


def test_the_journal_keeps_the_newest_steps_of_a_loop(registry: Registry) -> None:
    for _ in range(2 * LONGEST_JOURNAL):
        module_patch = put_on(registry)
        registry.take_off(module_patch)
    assert len(module_patch.journal) == LONGEST_JOURNAL
    assert [line.split()[2] for line in module_patch.journal[-2:]] == ["applied", "reverted"]
