"""All relations of a trainer as the test cases of a project of one's own."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .cells import ERROR, UNASKED, VIOLATED, Cell, Runs, asked, runs_of_trl
from .recipes import Make, made, recipe_of
from .relations import RELATIONS, Claim, Relation
from .setting import Setting


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
    folder = Path(tempfile.mkdtemp(prefix="relations-"))
    if recipe is not None:
        own, make = recipe_of(type(recipe(Setting(), folder / "first"))), recipe
    else:
        own = recipe_of(trainer_class)
        make = functools.partial(_made, own, trainer_class)
    runs, of_trl = Runs(make, folder / "own"), runs_of_trl(own, folder / "trl")
    for name in relations:
        for claim in RELATIONS[name].claims(own):
            one = Relation(name, RELATIONS[name].why, functools.partial(_only, claim))
            yield (
                f"{name}: {claim}",
                functools.partial(_check, functools.partial(asked, own.name, own, one, runs, of_trl)),
            )


def _made(own: Any, trainer_class: Any, setting: Setting, folder: Path) -> Any:
    return made(own, setting, folder, trainer_class)


def _only(claim: Claim, recipe: Any) -> Iterator[Claim]:
    yield claim


def _check(ask: Callable[[], Iterator[Cell]]) -> None:
    """Fail with what two runs disagree about, and skip what cannot be asked."""
    import pytest

    (cell,) = ask()
    if cell.state == UNASKED:
        pytest.skip(cell.why)
    lines = [f"{each.what}: {each.left:.6g} and {each.right:.6g}" for each in cell.differences]
    assert cell.state not in (VIOLATED, ERROR), "\n".join([RELATIONS[cell.relation].why, cell.why, *lines])
