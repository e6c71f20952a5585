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
from .cells import Cell, Runs, asked, runs_of_trl
from .recipes import RECIPES, CannotBeAskedError, Make, Recipe, made, recipe_of
from .relations import RELATIONS
from .setting import Setting


def trainer_of(name: str, folder: Path, *, is_recipe: bool) -> tuple[Recipe, Make]:
    """Return a recipe and what makes its trainers.

    ``name`` is a name of ``RECIPES``, or ``module:Class`` of a subclass of a trainer of TRL, or ``module:function`` of
    a recipe of the user, which makes a trainer for a setting and a folder.
    """
    if ":" not in name:
        recipe = RECIPES[name]
        recipe.classes()
        return recipe, lambda setting, folder: made(recipe, setting, folder)
    module_name, _, attribute = name.partition(":")
    found = getattr(import_module(module_name), attribute)
    if is_recipe:
        return recipe_of(type(found(Setting(), folder / "first"))), found
    own = recipe_of(found)
    return own, lambda setting, folder: made(own, setting, folder, found)


def main(out: str, task: str) -> None:
    import torch

    # transformers of 2024 saves what torch of 2025 refuses to load: random states that are numpy's.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    chosen = json.loads(Path(task).read_text(encoding="utf-8"))
    if chosen["on"]:
        engine.ENGINE.apply(None, None, None, None)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, Path(out).open("w", encoding="utf-8") as lines:

        def write(cell: Cell) -> None:
            lines.write(json.dumps(cell.as_data()) + "\n")
            lines.flush()

        try:
            recipe, make = trainer_of(chosen["trainer"], Path(folder), is_recipe=chosen["recipe"])
        except CannotBeAskedError as error:
            for name in chosen["relations"]:
                write(Cell(chosen["trainer"], name, "", "cannot be asked", str(error)))
            return
        runs = Runs(make, Path(folder, "own"))
        of_trl = runs_of_trl(recipe, Path(folder, "trl")) if ":" in chosen["trainer"] else None
        for name in chosen["relations"]:
            for cell in asked(chosen["trainer"], recipe, RELATIONS[name], runs, of_trl):
                write(cell)


if __name__ == "__main__":
    main(*sys.argv[1:])
