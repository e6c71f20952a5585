"""``pack_dataset`` with ``strategy="wrapped"`` packs the beginning of the dataset again for each batch of rows.

``datasets.map`` gives ``_pack_wrapped`` 1,000 rows at a time, as a slice of the piece that they lie in. Of a list
column ``column.values`` is the buffer of the whole piece, and knows nothing of the slice. Up to 0.29 the offsets of the
column cut it; 1.0.0rc1 leaves that out (pull request 5189), and 1.14.0 takes ``column.flatten()``, which is of the
slice (pull request 6670). A copy of the slice has a buffer of its own, which begins with its first row.

What ``datasets`` writes is in pieces of 1,000 rows, each of which is a batch. So rows that SFTTrainer tokenizes, or
gives their labels, are packed as they should.

The target is the function that is mapped: ``datasets`` knows the rows of the patched one from those in its cache.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome, Verdict


@wrapper
def pack_a_copy(call: Call) -> Any:
    """Pack a copy of the rows, if they are a slice of one buffer that begins with others."""
    examples = call["examples"]
    # Several chunks are copied by TRL itself.
    if not any(column.num_chunks == 1 and column.chunk(0).offset for column in examples.columns):
        return call()
    return call.with_(examples=examples.take(list(range(len(examples)))))()


_LENGTH = 4


def each_batch_packs_its_own_rows(module: ModuleType) -> Outcome:
    """Pack the batches of a table, and judge a sum of their tokens, each weighted by its place.

    Right are the tokens of the rows of each batch, wrong as many from the beginning of the table. Then both columns are
    compared, token by token.
    """
    if not hasattr(module, "_pack_wrapped"):
        return absent("this release has no _pack_wrapped")
    rows = [[10 * row + place for place in range(1 + row % 3)] for row in range(11)]
    table = module.pa.table({"input_ids": rows, "labels": [[-token for token in row] for row in rows]})
    every_token = [token for row in rows for token in row]
    packed, right, wrong = [], [], []
    # Batches of unequal sizes; the first is right in any case.
    for begin, end in ((0, 4), (4, 8), (8, 10), (10, 11)):
        packed.append(module._pack_wrapped(table.slice(begin, end - begin), seq_length=_LENGTH).to_pydict())
        tokens = [token for row in rows[begin:end] for token in row]
        right.append(_cut(tokens))
        wrong.append(_cut(every_token[: len(tokens)]))
    found = [batch["input_ids"] for batch in packed]
    outcome = judge(_weighted(found), right=_weighted(right), wrong=_weighted(wrong))
    expected = right if outcome.verdict is Verdict.FIXED else wrong
    for batch, of_batch in zip(packed, expected, strict=True):
        if batch != {"input_ids": of_batch, "labels": [[-token for token in row] for row in of_batch]}:
            raise AssertionError(f"packed {batch}, expected the input_ids {of_batch}")
    _check_chunks(module, table, every_token)
    return outcome


def _check_chunks(module: ModuleType, table: Any, tokens: list[int]) -> None:
    """Check a table of several chunks, slices of another one, which TRL copies itself."""
    chunks = module.pa.concat_tables([table.slice(4, 3), table.slice(7)])
    packed = module._pack_wrapped(chunks, _LENGTH).to_pydict()["input_ids"]
    if packed != _cut(tokens[tokens.index(40) :]):
        raise AssertionError(f"of two chunks, {packed} is packed")


def _cut(tokens: list[int]) -> list[list[int]]:
    return [tokens[begin : begin + _LENGTH] for begin in range(0, len(tokens), _LENGTH)]


def _weighted(batches: list[list[list[int]]]) -> float:
    tokens = [token for rows in batches for row in rows for token in row]
    return float(sum(place * token for place, token in enumerate(tokens, 1)))
