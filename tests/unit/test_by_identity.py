"""What is known of an object that may be equal to another, and that cannot be hashed."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from trl_hotfix.by_identity import ByIdentity


@dataclass
class Trainer:
    """As ``trl.experimental.kto.KTOTrainer`` of TRL 1.16.0: without a hash, and equal to each of its class."""


def test_each_object_has_its_own_value() -> None:
    known: ByIdentity[int] = ByIdentity()
    one, other = Trainer(), Trainer()
    known[one] = 1
    assert (known.get(one), known.get(other)) == (1, None)
    known[other] = 2
    known[one] = 3
    assert (known.get(one), known.get(other)) == (3, 2)


def test_an_object_that_is_gone_is_forgotten() -> None:
    known: ByIdentity[int] = ByIdentity()
    one = Trainer()
    known[one] = 1
    del one
    gc.collect()
    assert not known._by_id


def test_the_end_of_an_object_does_not_take_the_value_of_the_next_with_its_number() -> None:
    known: ByIdentity[int] = ByIdentity()
    one = Trainer()
    known[one] = 1
    ((first, _),) = known._by_id.values()
    known[one] = 2
    known._forget(id(one), first)
    assert known.get(one) == 2
