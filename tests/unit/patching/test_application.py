"""A patch is applied as a whole, or refused and rolled back."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
import trl.trainer.dpo_trainer as leaf
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.catalogue import modules
from trl_hotfix.matching import digests, fingerprints
from trl_hotfix.model import Outcome, Reason, State, Verdict
from trl_hotfix.patching import engine, phases

from helpers.made_up_patches import identity, is_marked, mark, pass_through, raises
from helpers.trl_like import NAME, double, doubles

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")


@pytest.mark.parametrize(
    ("self_test", "wrapper", "attribute", "expected"),
    [
        (is_marked, pass_through, "DPOTrainer.dpo_loss", (State.FAILED, Reason.SELF_TEST)),
        (raises, mark, "DPOTrainer.dpo_loss", (State.FAILED, Reason.SELF_TEST_ERROR)),
        (lambda module: "yes", mark, "DPOTrainer.dpo_loss", (State.FAILED, Reason.SELF_TEST_ERROR)),
        (is_marked, mark, "DPOTrainer.gone", (State.SKIPPED, Reason.MISSING_TARGET)),
        (is_marked, mark, "GoneTrainer.dpo_loss", (State.SKIPPED, Reason.MISSING_TARGET)),
        (is_marked, mark, "DPOTrainer.dpo_loss DPOTrainer._tag_names", (State.FAILED, Reason.INSTALL_ERROR)),
        (lambda module: Outcome(Verdict.FIXED), mark, "DPOTrainer.dpo_loss", (State.SKIPPED, Reason.NOT_REPRODUCED)),
        (lambda module: Outcome(Verdict.ABSENT), mark, "DPOTrainer.dpo_loss", (State.SKIPPED, Reason.NOT_REPRODUCED)),
    ],
)
def test_a_refused_patch_is_rolled_back(
    declare: Any,
    caplog: pytest.LogCaptureFixture,
    self_test: Any,
    wrapper: Any,
    attribute: str,
    expected: tuple[State, Reason],
) -> None:
    declare(self_test, wrapper, attribute=attribute)
    before = dict(vars(DPOTrainer))
    report = trl_hotfix.apply()
    assert identity(report) == expected
    assert report["made-up"].evidence
    assert not report.ok
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert dict(vars(DPOTrainer)) == before

    trl_hotfix.revert()
    with pytest.raises(trl_hotfix.NotAppliedError, match=f"made-up.*{expected[1].value}"):
        trl_hotfix.apply(strict="all")
    assert dict(vars(DPOTrainer)) == before


@pytest.mark.parametrize("unknown_body", ["skip", "try"])
@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ("buggy", {"skip": (State.APPLIED, Reason.PROVEN), "try": (State.APPLIED, Reason.PROVEN)}),
        ("fixed", dict.fromkeys(["skip", "try"], (State.SKIPPED, Reason.ALREADY_FIXED))),
        (None, {"skip": (State.SKIPPED, Reason.UNKNOWN_BODY), "try": (State.APPLIED, Reason.PROVEN)}),
    ],
)
def test_the_record_of_a_body_decides_before_the_self_test(
    declare: Any, monkeypatch: pytest.MonkeyPatch, verdict: str | None, expected: Any, unknown_body: Any
) -> None:
    tested = []

    def noted(module: Any) -> Outcome:
        tested.append(module)
        return is_marked(module)

    declare(noted, mark)
    asked: list[tuple[Any, ...]] = []
    bodies = SimpleNamespace(verdict=lambda *of: asked.append(of) or verdict, at=lambda *of: None)
    monkeypatch.setattr(fingerprints, "bodies", lambda: bodies)
    report = trl_hotfix.apply(unknown_body=unknown_body)
    assert identity(report) == expected[unknown_body]
    applied = report["made-up"].state is State.APPLIED
    assert len(tested) == (2 if applied else 0)
    assert (is_marked(leaf).verdict is Verdict.FIXED) == applied
    digest = digests.loaded(DPOTrainer.dpo_loss).digest
    assert asked == [("made-up", "trl.trainer.dpo_trainer:DPOTrainer.dpo_loss", digest)]
    trl_hotfix.revert()


@pytest.mark.parametrize("step", range(6))
def test_a_failed_installation_changes_nothing(declare: Any, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Three targets need three look-ups of a site and three assignments; each of the six fails once."""
    from trl_hotfix.patching import sites

    declare(is_marked, mark, attribute="DPOTrainer.dpo_loss DPOTrainer.get_batch_loss_metrics DPOTrainer.compute_loss")
    calls = iter(range(100))

    def failing(function: Any) -> Any:
        def fail_once(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == step:
                raise MemoryError("in the middle")
            return function(*args, **kwargs)

        return fail_once

    before = dict(vars(DPOTrainer))
    monkeypatch.setattr(sites.Sites, "at", failing(sites.Sites.at))
    monkeypatch.setattr(sites.Site, "put_on", failing(sites.Site.put_on))
    assert identity(trl_hotfix.apply()) == (State.FAILED, Reason.INSTALL_ERROR)
    after = dict(vars(DPOTrainer))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


# The module of the patch


@pytest.mark.parametrize("missing", ["wrapper", "self_test"])
def test_a_function_that_the_patchs_module_lacks_is_a_refusal_with_a_remedy(
    declare: Any, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = modules.module_of(declare(is_marked, mark).id)
    delattr(sys.modules[name], missing)
    before = dict(vars(DPOTrainer))
    report = trl_hotfix.apply()
    assert identity(report) == (State.FAILED, Reason.INSTALL_ERROR)
    remedy = f"{name} cannot be read (AttributeError: module {name!r} has no attribute {missing!r}); install trl_hotfix"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert remedy in caplog.text
    assert dict(vars(DPOTrainer)) == before


def test_a_module_that_ends_the_process_ends_no_import(
    declare: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def end(name: str) -> None:
        raise SystemExit(3)

    declare(is_marked, mark)
    monkeypatch.setattr(modules, "import_module", end)
    assert identity(trl_hotfix.apply()) == (State.FAILED, Reason.INSTALL_ERROR)
    assert "cannot be read (SystemExit: 3); install trl_hotfix again" in caplog.text


# Reloads


OWN_LOSS = "MadeUpTrainer.own_loss"


@pytest.fixture
def reloadable(declare: Any, trl_like: Any) -> Any:
    """Return the made-up module, with a patch that is on."""
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME)
    assert identity(trl_hotfix.apply()) == (State.APPLIED, Reason.PROVEN)
    return trl_like


def loss_of(cls: type) -> Any:
    return object.__new__(cls).own_loss(1)  # type: ignore[attr-defined]


def made_up_classes() -> list[type]:
    gc.collect()
    return [cls for cls in transformers.Trainer.__subclasses__() if cls.__module__ == NAME]


@pytest.mark.parametrize("observe", [False, True])
def test_many_reloads_leave_one_class_alive(reloadable: Any, observe: bool) -> None:
    trl_hotfix.apply(observe=observe)
    for _ in range(50):
        reloadable.reload()
    assert made_up_classes() == [reloadable.module.MadeUpTrainer]
    assert identity(trl_hotfix.status())[0] is (State.OBSERVED if observe else State.APPLIED)
    assert loss_of(reloadable.module.MadeUpTrainer) == (1 if observe else 2)
    (module_patch,) = engine.ENGINE.module_patches()
    assert len(module_patch.every_site()) == len(module_patch.sites)
    names = [name for cls, name in engine.site_registry()._sites if cls.__module__ == NAME]
    assert names.count("own_loss") <= 2
    # The layers that follow the trainers are on the five methods of each class that is alive.
    assert len(names) <= 2 * (1 + len(phases.METHODS))


def test_a_revert_between_reloads_keeps_no_class_alive(reloadable: Any) -> None:
    for _ in range(5):
        trl_hotfix.revert()
        reloadable.reload()
        trl_hotfix.apply()
    assert made_up_classes() == [reloadable.module.MadeUpTrainer]
    assert loss_of(reloadable.module.MadeUpTrainer) == 2


def test_a_class_that_somebody_has_stays_patched_after_a_reload(reloadable: Any) -> None:
    old = reloadable.module.MadeUpTrainer
    trainer = object.__new__(old)
    reloadable.reload(body="return loss + 0")
    new = reloadable.module.MadeUpTrainer
    assert new is not old
    assert identity(trl_hotfix.status()) == (State.APPLIED, Reason.PROVEN)
    assert (trainer.own_loss(1), loss_of(new)) == (2, 2)
    assert trl_hotfix.revert()["made-up"].state is State.REVERTED
    assert (trainer.own_loss(1), loss_of(new)) == (1, 1)
    assert not any(hasattr(cls.own_loss, "_trl_hotfix_site") for cls in (old, new))


def test_every_class_that_somebody_has_comes_off_again(reloadable: Any) -> None:
    classes = [reloadable.module.MadeUpTrainer]
    for _ in range(3):
        reloadable.reload()
        classes.append(reloadable.module.MadeUpTrainer)
    assert [loss_of(cls) for cls in classes] == [2] * 4
    trl_hotfix.revert("made-up")
    assert [loss_of(cls) for cls in classes] == [1] * 4


def test_a_refused_new_body_takes_the_patch_off_the_old_class(reloadable: Any) -> None:
    """The state speaks of both: a patch that is skipped is on no class."""
    old = reloadable.module.MadeUpTrainer
    reloadable.reload(body="return loss * 2")
    assert identity(trl_hotfix.status()) == (State.SKIPPED, Reason.NOT_REPRODUCED)
    assert loss_of(old) == 1
    assert loss_of(reloadable.module.MadeUpTrainer) == 2
    (module_patch,) = engine.ENGINE.module_patches()
    assert module_patch.every_site() == []
    del old
    assert len(made_up_classes()) == 1


def test_an_error_in_a_reloaded_class_takes_the_patch_off_the_old_one(
    reloadable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper that cannot be put on is an error of the installation, and no decision of the self-test."""
    from trl_hotfix.patching import sites

    old = reloadable.module.MadeUpTrainer

    def no_memory(site: Any, layer: Any) -> None:
        raise MemoryError("in the middle")

    monkeypatch.setattr(sites.Site, "put_on", no_memory)
    reloadable.reload()
    assert identity(trl_hotfix.status()) == (State.FAILED, Reason.INSTALL_ERROR)
    assert loss_of(old) == loss_of(reloadable.module.MadeUpTrainer) == 1


def test_foreign_code_on_the_old_class_does_not_stop_a_reload(reloadable: Any) -> None:
    old = reloadable.module.MadeUpTrainer
    old.own_loss = lambda self, loss: 7
    reloadable.reload(body="return loss * 2")
    assert identity(trl_hotfix.status()) == (State.SKIPPED, Reason.NOT_REPRODUCED)
    assert loss_of(old) == 7


def test_a_deleted_class_keeps_the_patch_where_it_is(reloadable: Any) -> None:
    """It is no reload: there is no new class."""
    old = reloadable.module.MadeUpTrainer
    del reloadable.module.MadeUpTrainer
    (module_patch,) = engine.ENGINE.module_patches()
    assert not module_patch.sites[0].is_of_class_before_reload(reloadable.module)
    reloadable.module.MadeUpTrainer = old
    trl_hotfix.revert()
    assert loss_of(old) == 1
