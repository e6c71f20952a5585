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
from ...model import Outcome


@wrapper
def alternate(call: Call) -> dict[str, list[Any]]:
    """Put a rejected row after each chosen one, from the pair after the next. Two pairs have no such pair."""
    rows: dict[str, list[Any]] = call()
    pairs = len(rows["label"]) // 2
    if pairs <= 2:
        return rows
    order = [row for pair in range(pairs) for row in (pair, pairs + (pair + 2) % pairs)]
    return {name: [values[row] for row in order] for name, values in rows.items()}


def kinds_alternate(module: ModuleType) -> Outcome:
    """Unpair three pairs, and count the rows that are of the kind of the row before."""
    if "desc" not in inspect.signature(module.maybe_unpair_preference_dataset).parameters:
        return absent("KTO shuffles its data in this release")
    kinds = module._unpair_row({"chosen": [*"abc"], "rejected": [*"def"]})["label"]
    return judge(sum(kind is before for before, kind in itertools.pairwise(kinds)), right=0, wrong=4)
