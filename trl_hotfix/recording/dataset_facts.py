"""The facts of the training dataset that a trainer got, by the names of ``catalogue.facts``."""

from __future__ import annotations

from typing import Any

from ..catalogue.conditions import Argument
from ..matching import dataset_facts
from ..matching.model_configs import unknown
from ..patching import given
from .models_within import tokenizer_of


def dataset_fact(trainer: Any, name: str) -> Argument:
    """Return a fact of the training dataset. Raises ``KeyError`` for another name."""
    dataset = given.dataset_of(trainer)
    if dataset is None:
        return unknown("the columns of the training dataset are not known")
    text_field = getattr(trainer.args, "dataset_text_field", "text")
    reader = dataset_facts.Reader(text_field, lambda: tokenizer_of(trainer).chat_template, "train_dataset")
    return dataset_facts.dataset_fact(name, dataset, reader)
