"""A flattened batch is worth what the padded one is, whatever the attention, the cache and checkpointing are."""

from __future__ import annotations

import pytest

from bench.proving.running import process
from bench.releases import layout
from helpers import sharing


@pytest.mark.parametrize("release", sharing.heavy(["0.16.1", "0.23.0"]))
def test_loss_gradients_and_tokens_are_those_of_the_padded_batch(release: str) -> None:
    place = layout.main_place(release)
    layout.build([place])
    differences = process(place, ["-m", "bench.inside.train_padding_free", "{out}"], 300)
    assert not isinstance(differences, str), differences
    assert len(differences) >= 9
    # A sum over 20 tokens.
    assert {name: values for name, values in differences.items() if max(values.values()) > 2e-5} == {}
