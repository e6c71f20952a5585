"""``pack_dataset`` with ``strategy="bfd"``, the default, makes several rows of one that is too long.

Up to 0.26.2 ``_pack_bfd`` cut each row at ``seq_length``. Pull request 4632 lets it cut a row into fragments of that
length in 0.27.0, and pack each as a row of its own. Pull request 5076 keeps the first fragment alone in 0.29.0, and
gives what 0.27 did another name, ``bfd-requeue``.

The wrapper cuts the rows before the call, so that each has one fragment. The target is the function that TRL maps over
the dataset. So ``datasets`` tells the rows that the patched one makes from those in its cache.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome


@wrapper
def pack_the_beginnings(call: Call) -> Any:
    """Pack the first ``seq_length`` tokens of each row, if a row has more."""
    import pyarrow.compute as pc

    examples, seq_length = call["examples"], call["seq_length"]
    # TRL refuses other columns.
    if not all(_is_list(column.type) for column in examples.columns):
        return call()
    lengths = [pc.list_value_length(column) for column in examples.columns]
    if not any(pc.any(pc.greater(of_column, seq_length)).as_py() for of_column in lengths):
        return call()
    columns = [pc.list_slice(column, 0, seq_length) for column in examples.columns]
    return call.with_(examples=type(examples).from_arrays(columns, names=examples.column_names))()


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind))


def rests_are_not_packed(module: ModuleType) -> Outcome:
    """Add up the tokens that are packed: those of the beginnings of three rows, or of all their pieces."""
    if not hasattr(module, "_pack_bfd"):
        return absent("this release has no _pack_bfd")
    rows = [[*range(3)], [*range(5)], [*range(12)]]
    packed = module._pack_bfd(module.pa.table({"input_ids": rows}), seq_length=4)["input_ids"].to_pylist()
    beginnings = sum(sum(row[:4]) for row in rows)
    return judge(sum(map(sum, packed)), right=beginnings, wrong=sum(map(sum, rows)))
