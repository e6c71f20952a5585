"""Three patches wrap ``SFTTrainer._prepare_dataset`` without disturbing each other."""

from __future__ import annotations

import pytest

from bench.proving.running import process
from bench.releases import layout
from helpers import sharing


@pytest.mark.parametrize("release", sharing.heavy(["0.17.0", "1.14.1"]))
def test_the_data_are_the_same_in_every_order(release: str) -> None:
    place = layout.main_place(release)
    layout.build([place])
    results = process(place, ["-m", "bench.inside.prepare_sft", "{out}"], 300)
    # Token ids, then the number of them that are trained. 1 is the end of sequence, 3 + n is the word n.
    assert results == [
        {
            "messages, formatted": [[[5, 4, 1], 3]],
            "another field, formatted": [[[5, 4, 7, 1], 4]],
            "another field": [[[4, 7, 1], 3]],
            "a pair, formatted": [[[5, 4, 1], 3]],
            "a pair, whose tokenizer ends texts": [[[4, 7, 8, 1, 1], 4]],
            "texts, whose tokenizer ends them": [[[4, 1, 1], 3], [[4, 5, 1, 1], 4]],
        }
    ]
