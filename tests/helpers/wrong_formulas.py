"""Ask each trainer whether its loss is a formula that is wrong: ``python -m helpers.wrong_formulas OUT TASK.json``.

A task has ``trainers``. OUT gets a line of JSON for each: its cell. Every formula computes what a model would whose
logits are 1 % larger, and those of ``WRONG`` have a wrong weight beside.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trl_hotfix.patching import engine
from trl_hotfix.relations import inside
from trl_hotfix.relations.by_hand import FORMULAS
from trl_hotfix.relations.cells import Runs, asked
from trl_hotfix.relations.relations import RELATIONS
from trl_hotfix.relations.trainers import RECIPES

WRONG: dict[str, dict[str, Any]] = {
    "DPO": {"beta": 0.11},
    "GRPO": {"beta": 0.2},
    "KTO": {"undesirable_weight": 1.1},
    "Reward": {"center_rewards_coefficient": 0.01},
    "GMPO": {"beta": 0.2},
    "A2PO": {"beta2": 0.2},
    "CPO": {"cpo_alpha": 1.1},
    "ORPO": {"beta": 0.2},
    "TPO": {"tpo_alpha": 1.1},
    "GKD": {"beta": 0.6},
    "GOLD": {"temperature": 1.0},
    "Distillation": {"temperature": 1.1},
    "IWOPD": {"beta": 0.5},
}
"""A weight of the formula that is not the trainer's, by trainer."""


def with_weight(formula: Callable[..., Any], weight: dict[str, Any]) -> Callable[..., Any]:
    """Return a formula that takes another weight for the trainer's."""

    def wrong(model: Any, reference: Any, batch: Any, args: Any) -> Any:
        return formula(model, reference, batch, SimpleNamespace(**{**vars(args), **weight}))

    return wrong


def of_sharper_model(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return a formula that takes the logits of the trained model for 1 % larger ones."""

    def wrong(model: Any, reference: Any, batch: Any, args: Any) -> Any:
        def sharper(**kwargs: Any) -> Any:
            return SimpleNamespace(logits=1.01 * model(**kwargs).logits)

        return formula(sharper, reference, batch, args)

    return wrong


def main(out: str, task: str) -> None:
    inside.prepare()
    engine.ENGINE.apply(None, None, None, None)
    with tempfile.TemporaryDirectory() as folder, Path(out).open("w", encoding="utf-8") as lines:
        for name in json.loads(Path(task).read_text(encoding="utf-8"))["trainers"]:
            right = FORMULAS[name]
            wrong = [of_sharper_model(right)]
            if name in WRONG:
                wrong.append(with_weight(right, WRONG[name]))
            for number, formula in enumerate([right, *wrong]):
                FORMULAS[name] = formula
                runs = Runs(RECIPES[name].make, Path(folder, name, str(number)))
                claim = next(RELATIONS["formulas"].claims(RECIPES[name]))
                cell = asked(name, "formulas", claim, runs).as_data()
                lines.write(json.dumps({**cell, "wrong": number}) + "\n")
                lines.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
