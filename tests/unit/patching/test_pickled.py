"""Copies and pickles of patched methods and functions."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import dill
import pytest
from helpers.made_up_patches import WORDS, pass_through, returns_the_option, stub_loss, use_the_option
from helpers.sample_trainers import Subclass, Trainer, layer, restore, site_of, target
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.model import Outcome, State, Verdict
from trl_hotfix.patching import engine
from trl_hotfix.patching.sites import Sites

pytestmark = pytest.mark.usefixtures("sample_trainers_restored", "dpo_trainer_unchanged")

WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "pickle by the oldest protocol": lambda value: pickle.loads(pickle.dumps(value, protocol=0)),
    "dill": lambda value: dill.loads(dill.dumps(value)),
    "dill with recurse": lambda value: dill.loads(dill.dumps(value, recurse=True)),
    "cloudpickle": lambda value: cloudpickle.loads(cloudpickle.dumps(value)),
}


@pytest.fixture(params=WAYS)
def roundtrip(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return WAYS[request.param]


# One method or function


def test_a_pickled_method_is_restored_by_reference(roundtrip: Callable[[Any], Any]) -> None:
    site_of("method").put_on(layer(revision=3))
    reference = (Trainer.__module__, "Trainer.method", (("a-patch", 3, ()),))
    assert roundtrip(Trainer.method) == ("restored", reference, None)
    assert roundtrip(Subclass.method) == ("restored", reference, None)


def test_a_pickled_bound_method_is_restored_with_its_instance(roundtrip: Callable[[Any], Any]) -> None:
    site_of("method").put_on(layer(revision=3))
    trainer = Trainer()
    trainer.mark = 17  # type: ignore[attr-defined]
    restored, reference, instance = roundtrip(trainer.method)
    assert (restored, reference) == ("restored", (Trainer.__module__, "Trainer.method", (("a-patch", 3, ()),)))
    assert vars(instance) == {"mark": 17}


def test_a_pickled_function_is_restored_by_reference(roundtrip: Callable[[Any], Any], utils: ModuleType) -> None:
    Sites(restore).at(utils, target("pad")).put_on(layer(revision=2))
    assert roundtrip(utils.pad) == ("restored", ("trl.hook_utils", "pad", (("a-patch", 2, ()),)), None)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "cloudpickle"])
def test_cloudpickle_of_a_descriptor_takes_the_original(way: str) -> None:
    # Only vars() returns this object: cloudpickle does not find it by its name, and takes the original's code.
    site_of("method").put_on(layer(revision=3))
    assert WAYS[way](vars(Trainer)["method"])[1] == (Trainer.__module__, "Trainer.method", (("a-patch", 3, ()),))
    assert WAYS["cloudpickle"](vars(Trainer)["method"])(Trainer(), 1) == 2


def test_cloudpickle_of_an_inherited_method_takes_the_original() -> None:
    site_of("inherited").put_on(layer())
    assert Trainer.inherited(Trainer(), 1) == 101
    assert WAYS["cloudpickle"](Trainer.inherited)(Trainer(), 1) == 1
    assert WAYS["pickle"](Trainer.inherited)[0] == "restored"
    assert WAYS["cloudpickle"](Trainer().inherited)[0] == "restored"


def test_a_pickle_names_every_patch_of_the_function(roundtrip: Callable[[Any], Any]) -> None:
    site = site_of("method")
    site.put_on(layer("first"))
    site.put_on(layer("second", revision=4))
    assert roundtrip(Trainer.method)[1][2] == (("first", 1, ()), ("second", 4, ()))


def test_a_pickle_names_the_options_of_a_patch(roundtrip: Callable[[Any], Any], utils: ModuleType) -> None:
    chosen = (("over", "all"), ("tail", "keep-it"))
    for site, held in ((site_of("method"), Trainer), (Sites(restore).at(utils, target("pad")), utils)):
        site.put_on(dataclasses.replace(layer(), options=chosen))
        assert roundtrip(getattr(held, site.name))[1][2] == (("a-patch", 1, chosen),)


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
    pickled = pickle.dumps(DPOTrainer.dpo_loss)
    trl_hotfix.apply(only=[])
    pickle.loads(pickled)
    assert stub_loss() == "no"


def test_unpickling_reapplies_that_patch_and_no_other(declare: Any) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    verdicts = itertools.cycle([Verdict.REPRODUCED, Verdict.FIXED])
    declare(lambda module: Outcome(next(verdicts)), pass_through, id="another", attribute="DPOTrainer.compute_loss")
    assert trl_hotfix.apply()["another"].state is State.APPLIED
    pickled = pickle.dumps(DPOTrainer.dpo_loss)
    trl_hotfix.revert()
    assert pickle.loads(pickled) is DPOTrainer.dpo_loss
    assert stub_loss() == "yes"
    assert trl_hotfix.status()["another"].state is not State.APPLIED


def test_unpickling_with_everything_off_applies_nothing(
    declare: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    trl_hotfix.apply()
    pickled = pickle.dumps(DPOTrainer.dpo_loss)
    trl_hotfix.revert()
    monkeypatch.setenv("TRL_HOTFIX", "0")
    assert type(pickle.loads(pickled)) is FunctionType
    assert "TRL_HOTFIX=0: the patches of a pickled function stay off" in caplog.text


def test_a_pickle_of_an_unknown_revision_or_patch_warns(declare: Any, caplog: pytest.LogCaptureFixture) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    patches = (("made-up", 7, (("word", "no"),)), ("gone", 1, ()))
    engine.restore(("trl.trainer.dpo_trainer", "DPOTrainer.dpo_loss", patches), None)
    assert stub_loss() == "no"
    assert "a pickle asks for made-up, revision 7; here it is revision 1" in caplog.text
    assert "a pickle asks for gone, revision 1; here it is not known" in caplog.text
