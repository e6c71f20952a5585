"""What a trainer is made with is noted beside the patches that are on, and TRL's constructor comes back with them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from helpers.made_up_patches import is_marked, mark, pass_through
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.model import Outcome, Verdict
from trl_hotfix.patching import given

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")


def made(**arguments: Any) -> Any:
    """Return what was noted of a trainer whose constructor fails."""
    trainer = object.__new__(DPOTrainer)
    with pytest.raises(Exception, match=r"."):
        trainer.__init__("a-model", **arguments)  # type: ignore[misc]
    return given.to(trainer)


def test_a_trainer_of_a_repaired_class_is_noted(declare: Any) -> None:
    declare(is_marked, mark)
    own, signature = vars(DPOTrainer)["__init__"], inspect.signature(DPOTrainer)
    assert made() is None
    trl_hotfix.apply()
    noted = made(beta=0.5)
    assert (noted["model"].value, noted["beta"].value) == ("a-model", 0.5)
    assert noted["peft_config"].kind.value == "not given"
    assert inspect.signature(DPOTrainer) == signature
    assert inspect.unwrap(DPOTrainer.__init__) is inspect.unwrap(own)
    assert DPOTrainer.__init__.__qualname__ == own.__qualname__
    trl_hotfix.revert()
    assert vars(DPOTrainer)["__init__"] is own
    assert made() is None


def test_the_constructor_comes_back_with_the_last_patch_of_its_class(declare: Any) -> None:
    declare(is_marked, mark)
    verdicts = iter([Verdict.REPRODUCED, Verdict.FIXED])
    other = {"id": "other-one", "attribute": "DPOTrainer.get_batch_samples"}
    declare(lambda module: Outcome(next(verdicts)), pass_through, **other)
    own = vars(DPOTrainer)["__init__"]
    trl_hotfix.apply()
    trl_hotfix.revert("made-up")
    assert vars(DPOTrainer)["__init__"] is not own
    trl_hotfix.revert("other-one")
    assert vars(DPOTrainer)["__init__"] is own


def test_the_constructor_comes_back_at_the_end_of_a_block(declare: Any) -> None:
    declare(is_marked, mark)
    own = vars(DPOTrainer)["__init__"]
    with trl_hotfix.patched("made-up"):
        assert made() is not None
    assert vars(DPOTrainer)["__init__"] is own


def test_what_other_code_has_put_on_top_stays(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(is_marked, mark)
    own = vars(DPOTrainer)["__init__"]
    trl_hotfix.apply()
    ours = vars(DPOTrainer)["__init__"]

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        ours(self, *args, **kwargs)

    DPOTrainer.__init__ = theirs
    assert trl_hotfix.status()["made-up"].state.value == "applied"
    trl_hotfix.revert()
    assert vars(DPOTrainer)["__init__"] is theirs
    DPOTrainer.__init__ = ours
    trl_hotfix.apply()
    trl_hotfix.revert()
    assert vars(DPOTrainer)["__init__"] is own


def test_a_list_that_may_be_a_dataset_is_not_looked_into() -> None:
    rows = given.described([{"prompt": "x"}] * (given.LONGEST_LIST + 1))
    assert (rows.made_by, rows.complete) == (("builtins.list",), False)
    circle: list[Any] = []
    circle.append(circle)
    assert given.described(circle).made_by == ("builtins.list",)
