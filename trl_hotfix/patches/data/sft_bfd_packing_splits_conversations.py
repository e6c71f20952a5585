"""``pack_dataset`` with ``strategy="bfd"``, the default, makes several rows of one that is too long.

Up to 0.26.2 ``_pack_bfd`` cut each row at ``seq_length``. Pull request 4632 lets it cut a row into fragments of that
length in 0.27.0, and pack each as a row of its own. Pull request 5076 keeps the first fragment alone in 0.29.0, and
gives what 0.27 did another name, ``bfd-requeue``.

The wrapper cuts the rows before the call, so that each has one fragment. The target is the function that is mapped:
``datasets`` knows the rows of the patched one from those in its cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...authoring import absent, argument, judge, replaced_argument
from ...model import Outcome, Verdict


def pack_the_beginnings(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Pack the first ``seq_length`` tokens of each row, if a row has more."""
    import pyarrow.compute as pc

    examples, seq_length = (argument(wrapped, args, kwargs, name) for name in ("examples", "seq_length"))
    # TRL refuses other columns.
    if not all(_is_list(column.type) for column in examples.columns):
        return wrapped(*args, **kwargs)
    lengths = [pc.list_value_length(column) for column in examples.columns]
    if not any(pc.any(pc.greater(of_column, seq_length)).as_py() for of_column in lengths):
        return wrapped(*args, **kwargs)
    columns = [pc.list_slice(column, 0, seq_length) for column in examples.columns]
    cut = type(examples).from_arrays(columns, names=examples.column_names)
    args, kwargs = replaced_argument(wrapped, args, kwargs, "examples", cut)
    return wrapped(*args, **kwargs)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind))


_LENGTH = 4
_LENGTHS = (3, 9, 1, 4, 5, 2, 13, 4)
"""How many tokens the rows have. Three rows are too long, by one token, by more than ``_LENGTH``, and by twice that."""


def rests_are_not_packed(module: ModuleType) -> Outcome:
    """Pack a table, and count the rows that are packed. Then compare their tokens, in two columns.

    Right are the beginnings of all rows, wrong are all of their pieces.
    """
    if not hasattr(module, "_pack_bfd"):
        return absent("this release has no _pack_bfd")
    rows = [[20 * row + place for place in range(length)] for row, length in enumerate(_LENGTHS)]
    pieces = [[tuple(row[begin : begin + _LENGTH]) for begin in range(0, len(row), _LENGTH)] for row in rows]
    beginnings = [of_row[0] for of_row in pieces]
    every_piece = [piece for of_row in pieces for piece in of_row]
    found = _packed(module, _table(module, rows))
    outcome = judge(float(len(found)), right=float(len(beginnings)), wrong=float(len(every_piece)))
    is_fixed = outcome.verdict is Verdict.FIXED
    if sorted(found) != sorted(beginnings if is_fixed else every_piece):
        raise AssertionError(f"packed {found}")
    if is_fixed:
        _check_other_tables(module, rows, beginnings)
        _check_the_wrapper(module)
    return outcome


def _table(module: ModuleType, rows: list[list[int]], *, large: bool = False) -> Any:
    """Return a table of the tokens, and of a label for each, which is the token with a minus."""
    kind = module.pa.large_list if large else module.pa.list_
    columns = {"input_ids": rows, "labels": [[-token for token in row] for row in rows]}
    return module.pa.table(
        {name: module.pa.array(of_name, kind(module.pa.int64())) for name, of_name in columns.items()}
    )


def _packed(module: ModuleType, table: Any) -> list[tuple[int, ...]]:
    """Return the rows that are packed, with the labels checked."""
    packed = module._pack_bfd(table, seq_length=_LENGTH).to_pydict()
    if packed["labels"] != [[-token for token in row] for row in packed["input_ids"]]:
        raise AssertionError(f"the labels are of other tokens: {packed}")
    if any(len(row) > _LENGTH for row in packed["input_ids"]):
        raise AssertionError(f"a packed row is longer than {_LENGTH}: {packed}")
    tokens = iter([token for row in packed["input_ids"] for token in row])
    return [tuple(itertools.islice(tokens, length)) for lengths in packed["seq_lengths"] for length in lengths]


def _check_other_tables(module: ModuleType, rows: list[list[int]], beginnings: list[tuple[int, ...]]) -> None:
    """Check large lists, a slice, and several chunks."""
    table = _table(module, rows)
    tables = {
        "large lists": (_table(module, rows, large=True), beginnings),
        "a slice": (table.slice(3), beginnings[3:]),
        "chunks": (module.pa.concat_tables([table.slice(0, 2), table.slice(4)]), beginnings[:2] + beginnings[4:]),
    }
    for name, (other, expected) in tables.items():
        found = _packed(module, other)
        if sorted(found) != sorted(expected):
            raise AssertionError(f"of {name}, {found} is packed")


def _check_the_wrapper(module: ModuleType) -> None:
    """Check which tables the wrapper hands on as they are, and what it makes of the others."""
    too_long, texts = _table(module, [[1] * 5, [2]]), module.pa.table({"input_ids": [[1] * 5], "text": ["a"]})
    labels_too_long = module.pa.table({"input_ids": [[1] * 4], "labels": [[1] * 5]})
    stay = {"rows that fit": _table(module, [[1] * 4, [2]]), "no rows": _table(module, []), "texts": texts}

    def pack(examples: Any, seq_length: int) -> Any:
        return examples

    for name, table in stay.items():
        if pack_the_beginnings(pack, None, (table, _LENGTH), {}) is not table:
            raise AssertionError(f"{name}: the table is another one")
    for table in (too_long, labels_too_long):
        cut = pack_the_beginnings(pack, None, (), {"examples": table, "seq_length": _LENGTH})
        expected = {name: [row[:4] for row in rows] for name, rows in table.to_pydict().items()}
        if cut.to_pydict() != expected or cut.schema != table.schema:
            raise AssertionError(f"{table} is cut to {cut}")
