"""All relations of a trainer as the test cases of a project of one's own."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .cells import ERROR, UNASKED, VIOLATED, Cell, Runs, asked
from .recipes import Make
from .relations import RELATIONS, claims_of
from .trainers import of_the_user


def parametrize(
    trainer_class: Any = None,
    *,
    recipe: Make | None = None,
    relations: Sequence[str] = tuple(RELATIONS),
    expected_failures: Mapping[str, str] | None = None,
) -> Any:
    """Return a decorator that gives a test each claim about a trainer as ``check``, a function to call.

    ``trainer_class`` is a subclass of a trainer of TRL that takes the same arguments; ``recipe(setting, folder)`` makes
    any other. ``expected_failures`` has a reason for each claim that does not hold, by its name, such as
    ``"accumulation: plain = batch_size=4 accumulation=2"``, or for a whole relation, by ``"accumulation"``. What TRL's
    own trainer violates alike is no failure. Raises ``ValueError`` for an unknown name. ::

        @parametrize(MyTrainer)
        def test_relations(check):
            check()
    """
    import pytest

    reasons = dict(expected_failures or {})
    checks = list(_checks(trainer_class, recipe, relations))
    names = {name for name, _ in checks} | {name.partition(": ")[0] for name, _ in checks}
    unknown = sorted(reasons.keys() - names)
    if unknown:
        raise ValueError(f"expected_failures: no claim or relation is named {unknown[0]!r}; there are {sorted(names)}")

    def case(name: str, check: Callable[[], None]) -> Any:
        reason = reasons.get(name, reasons.get(name.partition(": ")[0]))
        # Of a whole relation some claims may hold.
        marks = [pytest.mark.xfail(reason=reason, strict=name in reasons)] if reason else []
        return pytest.param(check, id=name, marks=marks)

    return pytest.mark.parametrize("check", [case(*each) for each in checks])


def _checks(
    trainer_class: Any, recipe: Make | None, relations: Sequence[str]
) -> Iterator[tuple[str, Callable[[], None]]]:
    # It is removed when the last check that holds it is gone.
    kept = tempfile.TemporaryDirectory(prefix="relations-")
    folder = Path(kept.name)
    is_recipe = recipe is not None
    own, make = of_the_user(recipe if is_recipe else trainer_class, folder / "first", is_recipe=is_recipe)
    runs, of_trl = Runs(make, folder / "own"), Runs(own.make, folder / "trl")
    for name in relations:
        for claim in claims_of(name, own):
            ask = functools.partial(asked, own.name, name, claim, runs, of_trl)
            yield f"{name}: {claim}", functools.partial(_check, ask, kept)


def _check(ask: Callable[[], Cell], kept: Any) -> None:
    """Fail with what two runs disagree about, and skip what cannot be asked. ``kept`` is the folder of the runs."""
    import pytest

    cell = ask()
    if cell.state == UNASKED:
        pytest.skip(cell.why)
    lines = [f"{each.what}: {each.left:.6g} and {each.right:.6g}" for each in cell.differences]
    assert cell.state not in (VIOLATED, ERROR), "\n".join([RELATIONS[cell.relation].why, cell.why, *lines])
