"""KTO and BCO see paired preferences as a block of chosen completions and a block of rejected ones.

Up to 0.11 KTO shuffled its data itself. 0.12.0 has it unpair preferences, and shuffle no more; BCO does the same from
0.17.0 on. ``_unpair_row`` returns the chosen rows of a block of ``datasets.map``, 1,000 by default, and then the
rejected ones. The trainers read their training data in order, and KTO must: to estimate the KL divergence it gives each
prompt the completion of the row before, within batches of a fixed order. That completion has to be of another prompt.
So chosen and rejected rows do not alternate pair by pair: after the chosen row of a pair comes the rejected one of the
pair after the next.

The target is the function that is mapped, and not the one that maps it: ``datasets`` then knows the rows of the patched
function from those that it has in its cache, for datasets, streams, and several processes alike.
"""

from __future__ import annotations

import inspect
import itertools
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome, Verdict
from ...testing import stream


@wrapper
def alternate(call: Call) -> dict[str, list[Any]]:
    """Put a rejected row after each chosen one, that of the pair after the next. Of two pairs there is none."""
    rows: dict[str, list[Any]] = call()
    pairs = len(rows["label"]) // 2
    if pairs <= 2:
        return rows
    order = [row for pair in range(pairs) for row in (pair, pairs + (pair + 2) % pairs)]
    return {name: [values[row] for row in order] for name, values in rows.items()}


def kinds_alternate(module: ModuleType) -> Outcome:
    """Unpair a dataset of 12 pairs as a trainer does, and count the rows that are of the kind of the row before.

    Each value must stay in its row, with prompts and without, and with a column more. No row may come after one of the
    same prompt, nor the first row of a batch of two, three or four have the prompt of the last.
    """
    if "desc" not in inspect.signature(module.maybe_unpair_preference_dataset).parameters:
        return absent("KTO shuffles its data in this release")
    pairs = {name: [f"{name} {number}" for number in range(12)] for name in ("prompt", "chosen", "rejected")}
    rows = list(module.unpair_preference_dataset(stream(_rows(pairs))))
    kinds = [row["label"] for row in rows]
    repeated = sum(kind == before for before, kind in itertools.pairwise(kinds))
    outcome = judge(float(repeated), right=0.0, wrong=22.0)
    if outcome.verdict is Verdict.FIXED:
        _check(rows, 12)
        for size in (2, 3, 4):
            _check_neighbours(rows, size)
        for number in (0, 1, 2, 3, 7):
            some = {name: values[:number] for name, values in pairs.items()}
            _check(_rows(module._unpair_row({**some, "source": list(range(number))})), number)
        without_prompt = module._unpair_row({"chosen": ["a"], "rejected": ["b"]})
        if without_prompt != {"completion": ["a", "b"], "label": [True, False]}:
            raise AssertionError(f"of a pair without a prompt, {without_prompt} is made")
    return outcome


def _rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _check(rows: list[dict[str, Any]], pairs: int) -> None:
    """Compare the rows with those of so many pairs: all columns of a row are of one pair."""
    order = [row for pair in range(pairs) for row in ((pair, "chosen"), ((pair + 2) % pairs, "rejected"))]
    if pairs <= 2:
        order = [(pair, side) for side in ("chosen", "rejected") for pair in range(pairs)]
    expected = [
        {"prompt": f"prompt {pair}", "completion": f"{side} {pair}", "label": side == "chosen", "source": pair}
        for pair, side in order
    ]
    # Up to 1.6 the other columns of the dataset are left out.
    expected = [{name: row[name] for name in (rows[0] if rows else ())} for row in expected]
    if rows != expected:
        raise AssertionError(f"the rows are {rows}: expected {expected}")


def _check_neighbours(rows: list[dict[str, Any]], size: int) -> None:
    for begin in range(0, len(rows), size):
        prompts = [row["prompt"] for row in rows[begin : begin + size]]
        if any(prompt == before for before, prompt in zip([prompts[-1], *prompts[:-1]], prompts, strict=True)):
            raise AssertionError(f"in a batch of {size} rows a prompt comes after itself: {prompts}")
