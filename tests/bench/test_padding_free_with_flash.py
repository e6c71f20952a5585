"""With the attention of FlashAttention a batch stays flattened, and is worth what the padded one is."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from bench.proving.running import process
from bench.releases import layout
from helpers import sharing

CASES = [
    ("sft", "0.16.1", None),
    ("sft", "0.18.2", None),
    ("sft", "0.19.0", "tf4.51"),
    ("sft", "0.19.1", None),
    ("sft", "0.22.0", None),
    ("sft", "0.23.0", "tf5.0"),
    ("completions", "0.11.4", None),
    ("completions", "0.16.1", None),
    ("dpo", "0.14.0", None),
    ("dpo", "0.16.1", "tf4.51"),
    ("dpo", "0.19.0", None),
    ("dpo", "0.28.0", None),
    ("dpo", "0.28.0", "tf5.2"),
]
"""Methods, releases and stacks: from 0.16 on the ends of each way in which a release flattens, on both sides of the
registry of attention functions (transformers 4.48) and of masks (4.53).

The collator of completions from 4.48 on is not among them: its ``cu_seq_lens_q`` has two dimensions and is passed on to
the kernel, which refuses it.
"""

PADDED = ("ipo", "liger")
"""What DPO cannot compute of one row, whatever the attention is."""


@cache
def answers(method: str, release: str, stack: str | None, switch: str) -> dict[str, dict[str, float]]:
    place = layout.main_place(release) if stack is None else layout.Place(release, stack)
    layout.build([place])
    result: Any = process(place, ["-m", "bench.inside.train_with_flash", "{out}", method, switch], 600)
    assert not isinstance(result, str), result
    return result


@pytest.mark.parametrize(("method", "release", "stack"), sharing.heavy(CASES))
def test_loss_and_gradients_are_those_of_the_padded_batch(method: str, release: str, stack: str | None) -> None:
    measured = answers(method, release, stack, "on")
    assert measured
    for case, answer in measured.items():
        is_padded = case.startswith(PADDED)
        # A sum over 20 tokens.
        differences = [value for name, value in answer.items() if name in ("loss", "gradient", "eval")]
        assert max(differences) < 2e-5, (case, answer)
        assert (answer["flat"] > 0) != is_padded, (case, answer)
        assert answer["sequences"] > 1, (case, answer)
        assert answer["messages"] == is_padded, (case, answer)


@pytest.mark.parametrize(("release", "stack"), sharing.heavy([("0.19.0", "tf4.51"), ("0.22.0", None)]))
def test_what_flash_attention_does_not_repair_by_itself(release: str, stack: str | None) -> None:
    """Packed, a first token is a label; and TRL gives position ids to an attention of a name that it knows only."""
    for case, answer in answers("sft", release, stack, "off").items():
        if case.startswith("packed"):
            assert answer["loss"] > 1, (case, answer)
        elif case.endswith("flash_attention_2"):
            # Each first token is in a prompt.
            assert max(answer["loss"], answer["gradient"]) < 2e-5, (case, answer)
        else:
            assert answer["gradient"] > 0.1, (case, answer)
