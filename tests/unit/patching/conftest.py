from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from helpers import sample_trainers
from helpers.sample_trainers import RAW, Trainer, asked_for


@pytest.fixture
def sample_trainers_restored() -> Iterator[None]:
    """Put the attributes of the sample trainer back after a test."""
    asked_for.clear()
    yield
    asked_for.clear()
    for name in set(vars(Trainer)) - set(RAW):
        delattr(Trainer, name)
    for name in ("method", "static", "klass", "coroutine", "prop", "number"):
        setattr(Trainer, name, RAW[name])


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return sample_trainers.new_module(monkeypatch, "trl.hook_utils", sample_trainers.UTILS)


@pytest.fixture
def dpo_trainer_unchanged() -> Iterator[None]:
    """Compare the attributes of TRL's DPOTrainer after a test with those before it, by identity."""
    from trl.trainer.dpo_trainer import DPOTrainer

    before = dict(vars(DPOTrainer))
    yield
    after = dict(vars(DPOTrainer))
    assert set(after) == set(before)
    assert all(after[name] is before[name] for name in before)
