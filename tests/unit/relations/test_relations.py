from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.relations import parametrize
from trl_hotfix.relations.by_hand import FORMULAS
from trl_hotfix.relations.cells import ERROR, HOLDS, OF_TRL, UNASKED, VIOLATED, Runs, asked
from trl_hotfix.relations.claims import Averaged, OfFormula, Pair, Saved, Standstill, Unlike
from trl_hotfix.relations.relations import RELATIONS
from trl_hotfix.relations.run import Run
from trl_hotfix.relations.setting import CannotBeAskedError, Setting
from trl_hotfix.relations.trainers import RECIPES

LEFT, RIGHT = Setting(batch_size=4), Setting(batch_size=2)


CLAIM = Pair(LEFT, RIGHT)


class Known(Runs):
    """Runs that are not run: by batch size, what is logged, or what is raised."""

    def __init__(self, by_size: dict[int, dict[str, float] | Exception]) -> None:
        self.by_size = by_size

    def of(self, setting: Setting) -> Run:
        found = self.by_size[setting.batch_size]
        if isinstance(found, Exception):
            raise found
        return Run(logs=[found])


def state(own: dict[int, Any], of_trl: dict[int, Any] | None = None) -> tuple[str, list[str]]:
    known = None if of_trl is None else Known(of_trl)
    cell = asked("SFT", "accumulation", CLAIM, Known(own), known)
    return cell.state, [difference.what for difference in cell.differences]


def test_states_of_a_claim() -> None:
    assert state({4: {"loss": 1.0}, 2: {"loss": 1.0}}) == (HOLDS, [])
    assert state({4: {"loss": 1.0}, 2: {"loss": 2.0}}) == (VIOLATED, ["loss of step 1"])
    assert state({4: {"loss": 1.0}, 2: CannotBeAskedError("no")}) == (UNASKED, [])
    assert state({4: {"loss": 1.0}, 2: KeyError("x")}) == (ERROR, [])


def test_what_the_trainer_of_trl_violates_alike_is_not_the_users() -> None:
    own = {4: {"loss": 1.0, "kl": 1.0}, 2: {"loss": 2.0, "kl": 2.0}}
    assert state(own, {4: {"loss": 1.0, "kl": 1.0}, 2: {"loss": 1.0, "kl": 3.0}}) == (VIOLATED, ["loss of step 1"])
    assert state(own, {4: {"loss": 1.0, "kl": 1.0}, 2: {"loss": 3.0, "kl": 3.0}})[0] == OF_TRL


NOT_ASKED = {"PPO": ("saving", "formulas"), "PRM": ("models",), **dict.fromkeys(FORMULAS.keys() - {"PRM"}, ())}
"""Relations that have no claim about a trainer. Of one that is not here, it is formulas."""


def test_every_relation_has_claims_for_every_trainer_and_each_has_a_name_of_its_own() -> None:
    for recipe in RECIPES.values():
        names = [f"{name}: {claim}" for name, relation in RELATIONS.items() for claim in relation.claims(recipe)]
        assert len({*names}) == len(names), recipe.name
        asked_of = {name.partition(":")[0] for name in names}
        assert asked_of >= RELATIONS.keys() - {"limits", *NOT_ASKED.get(recipe.name, ("formulas",))}, recipe.name


def test_a_setting_is_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_hotfix.relations import cells

    calls = []
    monkeypatch.setattr(cells, "run", lambda make, setting, folder: calls.append(setting) or Run(logs=[]))
    runs = Runs(lambda setting, folder: None, tmp_path)
    for claim in itertools.islice(RELATIONS["accumulation"].claims(RECIPES["SFT"]), 3):
        asked("SFT", "accumulation", claim, runs)
    assert len(calls) == 4


def test_where_nothing_moves_an_evaluation_shows_what_the_training_of_its_rows_does() -> None:
    claim = Standstill(LEFT)
    shown = Run(logs=[{"loss": 1.0, "grad_norm": 2.0}], evaluations=[{"eval_loss": 1.0}, {"eval_loss": 1.5}])
    assert not list(claim.violations(lambda setting: shown))
    assert [each.what for each in Standstill(LEFT, twice=True).violations(lambda setting: shown)] == [
        "evaluation: loss of step 1"
    ]
    shown.logs[0]["loss"] = 1.2
    assert [each.what for each in claim.violations(lambda setting: shown)] == [
        "training and evaluation: loss of step 1"
    ]


def test_a_log_of_several_steps_has_the_means_of_their_logs() -> None:
    each = [{"loss": 1.0, "num_tokens": 5.0}, {"loss": 2.0, "num_tokens": 9.0}]
    runs = {4: Run(logs=each), 2: Run(logs=[{"loss": 1.5, "num_tokens": 9.0}])}
    assert not list(Averaged(LEFT, RIGHT).violations(lambda setting: runs[setting.batch_size]))
    runs[2].logs[0]["loss"] = 2.0
    (found,) = Averaged(LEFT, RIGHT).violations(lambda setting: runs[setting.batch_size])
    assert (found.what, found.left, found.right) == ("means until the end: loss of step 2", 1.5, 2.0)


def test_a_model_that_does_not_see_its_images_has_the_same_gradient_for_others() -> None:
    torch = pytest.importorskip("torch")
    runs = {4: Run(gradients=[{"weight": torch.ones(1)}]), 2: Run(gradients=[{"weight": torch.zeros(1)}])}
    claim = Unlike(LEFT, RIGHT)
    assert not list(claim.violations(lambda setting: runs[setting.batch_size]))
    (found,) = claim.violations(lambda setting: runs[4])
    assert found.what == "gradient of step 1: the same"


def test_what_was_trained_is_on_disk() -> None:
    torch = pytest.importorskip("torch")
    run = Run(
        start={"adapter": torch.zeros(1)}, weights={"adapter": torch.ones(1), "base": torch.ones(1)}, saved={"base": 1}
    )
    assert [each.what for each in Saved(LEFT).violations(lambda setting: run)] == [
        "weights in memory and saved: tensors"
    ]
    run.saved = {"adapter": torch.ones(1)}
    assert not list(Saved(LEFT).violations(lambda setting: run))


def test_a_step_has_the_loss_and_the_gradient_of_its_formula() -> None:
    torch = pytest.importorskip("torch")
    gradients = [{"weight": torch.tensor([1.0])}, {"weight": torch.tensor([2.0])}]
    run = Run(logs=[{"loss": 1.0}, {"loss": 3.0}], gradients=gradients, by_hand=(3.0, {"weight": torch.tensor([2.0])}))
    assert not list(OfFormula(LEFT).violations(lambda setting: run))
    run.by_hand = 2.0, {"weight": torch.tensor([2.1])}
    assert [each.what for each in OfFormula(LEFT).violations(lambda setting: run)] == [
        "formula and loss of step 2",
        "gradient by formula and of step 2: norm",
    ]


@pytest.mark.needs_trl
def test_an_expected_failure_that_is_no_claim_is_an_error() -> None:
    import trl

    with pytest.raises(ValueError, match="no claim or relation is named 'accumulates'"):
        parametrize(trl.SFTTrainer, expected_failures={"accumulates": "why not"})


@pytest.mark.needs_trl
def test_a_class_that_is_of_no_trainer_cannot_be_asked() -> None:
    with pytest.raises(CannotBeAskedError, match="int inherits from none of SFTTrainer"):
        parametrize(int)


def test_a_failed_run_is_kept_as_a_text_without_its_trainer(tmp_path: Path) -> None:
    class Trainer: ...

    made: list[weakref.ref[Trainer]] = []

    def make(setting: Setting, folder: Path) -> Trainer:
        trainer = Trainer()
        made.append(weakref.ref(trainer))
        raise KeyError(setting.batch_size)

    runs = Runs(make, tmp_path)
    for _ in range(2):
        cell = asked("SFT", "accumulation", CLAIM, runs)
        assert (cell.state, cell.why.partition(" (")[0]) == (ERROR, "KeyError: 4")
    assert len(made) == 1
    gc.collect()
    assert made[0]() is None
