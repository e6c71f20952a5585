"""``pack_dataset`` with ``strategy="wrapped"`` packs the beginning of the dataset again for each batch of rows.

``datasets.map`` gives ``_pack_wrapped`` 1,000 rows at a time, as a slice of the piece that they lie in. Of a list
column ``column.values`` is the buffer of the whole piece, and knows nothing of the slice. Up to 0.29 the offsets of the
column cut it; 1.0.0rc1 leaves that out (pull request 5189), and 1.14.0 takes ``column.flatten()``, which is of the
slice (pull request 6670). A copy of the slice has a buffer of its own, which begins with its first row.

``datasets`` writes pieces of 1,000 rows, and each is a batch. So TRL packs rows correctly that SFTTrainer tokenizes, or
gives their labels.

The target is the function that TRL maps over the dataset. So ``datasets`` tells the rows of the patched one from
those in its cache.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome


@wrapper
def pack_a_copy(call: Call) -> Any:
    """Pack a copy of the rows, if they are a slice of one buffer that begins with others."""
    examples = call["examples"]
    # Several chunks are copied by TRL itself.
    if not any(column.num_chunks == 1 and column.chunk(0).offset for column in examples.columns):
        return call()
    return call.with_(examples=examples.take(list(range(len(examples)))))()


def each_batch_packs_its_own_rows(module: ModuleType) -> Outcome:
    """Add up the tokens that are packed of a later batch: its own, or as many from the beginning of the table."""
    if not hasattr(module, "_pack_wrapped"):
        return absent("this release has no _pack_wrapped")
    batch = module.pa.table({"input_ids": [[1, 2], [3], [4, 5, 6]]}).slice(1)
    packed = module._pack_wrapped(batch, seq_length=4)["input_ids"].to_pylist()
    return judge(sum(map(sum, packed)), right=3 + 4 + 5 + 6, wrong=1 + 2 + 3 + 4)
