"""Copies and pickles of patched methods and functions."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cloudpickle
import dill
import pytest
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.model import Outcome, State, Verdict
from trl_hotfix.patching import engine, pickled
from trl_hotfix.patching.sites import Sites
from trl_hotfix.patching.wrappers import reference_of

from helpers import sample_trainers
from helpers.made_up_patches import (
    MARK,
    WORDS,
    is_marked,
    mark,
    pass_through,
    returns_the_option,
    stub_loss,
    use_the_option,
)
from helpers.sample_trainers import Subclass, Trainer, asked_for, layer, site_of, target

pytestmark = pytest.mark.usefixtures("sample_trainers_restored", "dpo_trainer_unchanged")

WAYS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "pickle": (pickle.dumps, pickle.loads),
    "pickle by the oldest protocol": (lambda value: pickle.dumps(value, protocol=0), pickle.loads),
    "dill": (dill.dumps, dill.loads),
    "dill with recurse": (lambda value: dill.dumps(value, recurse=True), dill.loads),
    "cloudpickle": (cloudpickle.dumps, cloudpickle.loads),
}
# copyreg notes the slots of a class in the class, when an instance is pickled for the first time.
pickle.dumps(object.__new__(DPOTrainer))

PYTHON = ("pickle", "pickle by the oldest protocol")
"""These pickle a bound method, of whatever class, as its instance and its name."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have unpickling only note the reference in ``asked_for``."""
    monkeypatch.setattr(pickled, "restore", sample_trainers.restore)


def roundtrip(way: str, value: Any) -> Any:
    """Return the value after a pickle, with ``asked_for`` as the loading leaves it."""
    dumps, loads = WAYS[way]
    data = dumps(value)
    asked_for.clear()
    return loads(data)


# One method or function


@pytest.mark.usefixtures("noting")
def test_a_pickled_method_is_restored_by_reference(way: str) -> None:
    site_of("method").put_on(layer(revision=3))
    for owner in (Trainer, Subclass):
        assert roundtrip(way, owner.method) is vars(Trainer)["method"]
        assert asked_for == [(Trainer.__module__, "Trainer.method", (("a-patch", 3, ()),))]


@pytest.mark.usefixtures("noting")
def test_a_pickled_bound_method_is_restored_with_its_instance(way: str) -> None:
    site_of("method").put_on(layer(revision=3))
    trainer = Trainer()
    trainer.mark = 17  # type: ignore[attr-defined]
    restored = roundtrip(way, trainer.method)
    reference = (Trainer.__module__, "Trainer.method", (("a-patch", 3, ()),))
    assert asked_for == ([] if way in PYTHON else [reference])
    assert vars(restored.__self__) == {"mark": 17}
    assert restored.__func__ is vars(Trainer)["method"]
    assert restored(1) == 102


@pytest.mark.usefixtures("noting")
def test_a_pickled_function_is_restored_by_reference(way: str, utils: ModuleType) -> None:
    Sites().at(utils, target("pad")).put_on(layer(revision=2))
    assert roundtrip(way, utils.pad) is utils.pad
    assert asked_for == [("trl.hook_utils", "pad", (("a-patch", 2, ()),))]


@pytest.mark.usefixtures("noting")
@pytest.mark.parametrize("name", ["static", "klass"])
def test_a_pickled_static_or_class_method_is_restored_by_reference(way: str, name: str) -> None:
    site_of(name).put_on(layer())
    method = getattr(Trainer, name)
    restored = roundtrip(way, method)
    by_name = name == "klass" and way in PYTHON
    assert asked_for == ([] if by_name else [(Trainer.__module__, f"Trainer.{name}", (("a-patch", 1, ()),))])
    assert restored == method


@pytest.mark.usefixtures("noting")
@pytest.mark.parametrize("name", ["method", "inherited"])
def test_a_pickled_descriptor_is_restored_by_reference(way: str, name: str) -> None:
    site_of(name).put_on(layer(revision=3))
    assert roundtrip(way, vars(Trainer)[name]) is vars(Trainer)[name]
    assert asked_for == [(Trainer.__module__, f"Trainer.{name}", (("a-patch", 3, ()),))]


@pytest.mark.usefixtures("noting")
def test_a_pickle_names_every_patch_of_the_function(way: str) -> None:
    site = site_of("method")
    site.put_on(layer("first"))
    site.put_on(layer("second", revision=4))
    roundtrip(way, Trainer.method)
    assert [patches for _, _, patches in asked_for] == [(("first", 1, ()), ("second", 4, ()))]


@pytest.mark.usefixtures("noting")
def test_a_pickle_names_the_options_of_a_patch(way: str, utils: ModuleType) -> None:
    chosen = (("over", "all"), ("tail", "keep-it"))
    for site, held in ((site_of("method"), Trainer), (Sites().at(utils, target("pad")), utils)):
        site.put_on(dataclasses.replace(layer(), options=chosen))
        roundtrip(way, getattr(held, site.name))
        assert [patches for _, _, patches in asked_for] == [(("a-patch", 1, chosen),)]


def test_a_wrapper_is_deep_copied_as_a_function_is() -> None:
    site_of("method").put_on(layer())
    wrapper = vars(Trainer)["method"]
    assert copy.deepcopy(wrapper) is wrapper


def test_a_wrapper_is_copied_as_a_function_is() -> None:
    site_of("method").put_on(layer())
    wrapper = vars(Trainer)["method"]
    assert copy.copy(wrapper) is wrapper


@pytest.mark.parametrize("attribute", ["method"])
def test_a_held_bound_method_can_be_deep_copied(attribute: str) -> None:
    site_of(attribute).put_on(layer())
    trainer = Trainer()
    held: dict[str, Any] = {"trainer": trainer, "call": trainer.method}
    copied = copy.deepcopy(held)
    assert copied["call"](1) == 102
    assert copied["call"].__self__ is copied["trainer"]


def test_a_bound_method_can_be_copied() -> None:
    site_of("method").put_on(layer())
    trainer = Trainer()
    assert copy.copy(trainer.method)(1) == 102


# What unpickling applies


def test_a_worker_restores_a_patched_function_with_its_options(declare: Any) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    trl_hotfix.apply(options={"made-up": {"word": "no"}})
    data = pickle.dumps(DPOTrainer.dpo_loss)
    trl_hotfix.apply(only=[])
    pickle.loads(data)
    assert stub_loss() == "no"


@pytest.mark.parametrize("way", [way for way in WAYS if way not in PYTHON])
def test_a_worker_restores_a_bound_method(way: str, declare: Any) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    dumps, loads = WAYS[way]
    data = dumps(object.__new__(DPOTrainer).dpo_loss)
    trl_hotfix.apply(only=[])
    assert loads(data)(1, 2, 3, 4) == MARK
    assert trl_hotfix.status()["made-up"].state is State.APPLIED


@pytest.mark.parametrize("way", PYTHON)
def test_a_bound_method_pickled_by_name_is_what_the_process_has(way: str, declare: Any) -> None:
    """Python pickles the instance and the name, as for every method, so the worker needs its own ``apply()``."""
    declare(is_marked, mark)
    trl_hotfix.apply()
    dumps, loads = WAYS[way]
    data = dumps(object.__new__(DPOTrainer).dpo_loss)
    assert loads(data)(1, 2, 3, 4) == MARK
    trl_hotfix.revert()
    assert loads(data).__func__ is vars(DPOTrainer)["dpo_loss"]
    assert trl_hotfix.status()["made-up"].state is State.REVERTED
    trl_hotfix.apply()
    assert loads(data)(1, 2, 3, 4) == MARK


def test_unpickling_reapplies_that_patch_and_no_other(declare: Any) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    verdicts = itertools.cycle([Verdict.REPRODUCED, Verdict.FIXED])
    declare(lambda module: Outcome(next(verdicts)), pass_through, id="another", attribute="DPOTrainer.compute_loss")
    assert trl_hotfix.apply()["another"].state is State.APPLIED
    data = pickle.dumps(DPOTrainer.dpo_loss)
    trl_hotfix.revert()
    assert pickle.loads(data) is DPOTrainer.dpo_loss
    assert stub_loss() == "yes"
    assert trl_hotfix.status()["another"].state is not State.APPLIED


def test_unpickling_with_everything_off_applies_nothing(
    declare: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    trl_hotfix.apply()
    data = pickle.dumps(DPOTrainer.dpo_loss)
    trl_hotfix.revert()
    monkeypatch.setenv("TRL_HOTFIX", "0")
    assert reference_of(pickle.loads(data)) is None
    assert "TRL_HOTFIX=0: the patches of a pickled function stay off" in caplog.text


def test_a_pickle_of_an_unknown_revision_or_patch_warns(declare: Any, caplog: pytest.LogCaptureFixture) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    patches = (("made-up", 7, (("word", "no"),)), ("gone", 1, ()))
    engine.restore(("trl.trainer.dpo_trainer", "DPOTrainer.dpo_loss", patches))
    assert stub_loss() == "no"
    assert "a pickle asks for made-up, revision 7; here it is revision 1" in caplog.text
    assert "a pickle asks for gone, revision 1; here it is not known" in caplog.text


# What the user has left out


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_a_pickle_does_not_put_on_what_is_left_out(
    declare: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    declare(is_marked, mark)
    declare(is_marked, mark, id="other-one")
    trl_hotfix.apply(only=["made-up"])
    pickled_method = pickle.dumps(DPOTrainer.dpo_loss)
    trl_hotfix.revert()
    if by == "argument":
        trl_hotfix.apply(skip=["made-up", "other-one"])
    else:
        monkeypatch.setenv("TRL_HOTFIX_SKIP", "made-up,other-one")
        trl_hotfix.apply()
    caplog.clear()
    restored = pickle.loads(pickled_method)
    assert restored is DPOTrainer.dpo_loss
    assert reference_of(restored) is None
    assert trl_hotfix.status()["made-up"].state is State.DISABLED
    assert "a pickle asks for made-up, which this process leaves out: it stays off" in caplog.text
