"""Run the cells of one trainer in a process of their own: ``python -m trl_hotfix.relations.inside OUT TASK.json``.

A line of JSON for each cell is written to OUT as soon as it is there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from ..patching import engine
from . import ledger
from .cells import UNASKED, Cell, Runs, asked
from .changes import applied
from .recipes import Make, Recipe
from .relations import claims_of
from .setting import CannotBeAskedError
from .trainers import RECIPES, of_the_user


def trainer_of(name: str, folder: Path, *, is_recipe: bool) -> tuple[Recipe, Make]:
    """Return a recipe and what makes its trainers.

    ``name`` is a name of ``RECIPES``, or ``module:Class`` of a subclass of a trainer of TRL, or ``module:function`` of
    a recipe of the user, which makes a trainer for a setting and a folder.
    """
    if ":" not in name:
        recipe = RECIPES[name]
        recipe.classes()
        return recipe, recipe.make
    module_name, _, attribute = name.partition(":")
    return of_the_user(getattr(import_module(module_name), attribute), folder / "first", is_recipe=is_recipe)


def prepare() -> None:
    """Make runs of this process the same on every machine."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    # transformers of 2024 saves what torch of 2025 refuses to load: random states that are numpy's.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    torch.set_num_threads(1)


def main(out: str, task: str) -> None:
    prepare()
    chosen = json.loads(Path(task).read_text(encoding="utf-8"))
    if chosen["on"]:
        engine.ENGINE.apply(None, None, None, None)
    with tempfile.TemporaryDirectory() as folder, Path(out).open("w", encoding="utf-8") as lines:

        def write(cell: Cell, trainer: str = "") -> None:
            data = ledger.with_causes(cell.as_data(), trainer, on=chosen["on"])
            lines.write(json.dumps(data) + "\n")
            lines.flush()

        try:
            recipe, make = trainer_of(chosen["trainer"], Path(folder), is_recipe=chosen["recipe"])
        except CannotBeAskedError as error:
            # There is no claim that could have the text.
            for name in () if chosen["having"] else chosen["relations"]:
                write(Cell(chosen["trainer"], name, "", UNASKED, str(error)))
            return
        runs = Runs(applied(recipe, make), Path(folder, "own"))
        of_trl = Runs(applied(recipe, recipe.make), Path(folder, "trl")) if ":" in chosen["trainer"] else None
        for name in chosen["relations"]:
            for claim in claims_of(name, recipe):
                if chosen["having"] in str(claim):
                    write(asked(chosen["trainer"], name, claim, runs, of_trl), recipe.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
