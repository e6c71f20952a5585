"""How a trainer is made and run, as data. A relation compares runs of two settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

ROWS = 20
"""The rows of every dataset. With steps of eight rows the last window of an epoch is incomplete."""

HELD_OUT = tuple(range(9))
"""The rows of an evaluation: their number divides by no batch size but 9, 3 and 1."""


class CannotBeAskedError(Exception):
    """A trainer cannot be made or run in a setting, and says so itself. ``args`` has its reason."""


@dataclass(frozen=True)
class Setting:
    """One way to make and run a trainer.

    ``arguments`` are fields of the trainer's config.

    Its rows: ``order`` are the numbers of the dataset's rows, and ``in_order`` trains on them as they stand, without
    shuffling. ``data`` is what holds them, ``"table"`` or ``"stream"``. ``equal_lengths``: all completions have the
    same. The n-th completion of a prompt is number ``answers_from`` + n; ``samples``: the model generates them itself.
    ``evaluates``: on rows ``"held out"``, on the ``"training"`` rows, or on ``"two sets"`` by name.

    ``form`` is a form of its rows, by a name of ``forms.FORMS``. ``images`` is how they hold an image, a name of
    ``images.HELD``.

    Its text: ``marks`` are what the tokenizer writes around a text itself, or that it pads with its end. It pads on
    ``padding_side``; empty is the side that the trainer needs. ``width`` is the multiple to which batches are padded.

    Its model: ``dtype``, the base's. ``adapter``: LoRA as a new ``PeftModel`` (``"model"``), as one that was
    saved (``"path"``), by ``peft_config`` (``"config"``), or none. ``base`` is a model to use again.
    ``second``: another trainer has trained on the same base before. ``architecture`` is a name of
    ``architectures.ARCHITECTURES``. ``by_path``: the trainer loads it. ``reference`` is another model, the ``"same"``,
    or ``"none"``.

    Its run: ``resume_at``: the run is saved at this step, and a new trainer goes on. ``ranks`` are processes, each with
    batches of ``batch_size``, and ``engine`` is what shards the weights over them, a name of ``engines.ENGINES``.
    ``callback`` is the name of a callback of TRL. ``drawn`` random numbers are drawn before the trainer is made.
    ``saves``: it is saved in the end and loaded. ``by_hand`` is the formula of its loss, by a name of
    ``by_hand.FORMULAS``.
    """

    batch_size: int = 8
    accumulation: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[int, ...] = tuple(range(ROWS))
    in_order: bool = False
    data: str = "table"
    form: str = ""
    images: str = ""
    marks: str = ""
    equal_lengths: bool = False
    answers_from: int = 0
    samples: bool = False
    evaluates: str = ""
    eval_batch_size: int = 4
    padding_side: str = ""
    width: int = 1
    pad_embedding: float = 0.0
    dtype: str = "float32"
    adapter: str = ""
    base: Any = field(default=None, repr=False)
    second: bool = False
    architecture: str = ""
    by_path: bool = False
    reference: str = "another"
    saves: bool = False
    by_hand: str = ""
    resume_at: int = 0
    ranks: int = 1
    engine: str = ""
    callback: str = ""
    drawn: int = 0

    def but(self, **changes: Any) -> Setting:
        """Return this setting with some fields changed. ``arguments`` are added to those that it has."""
        if "arguments" in changes:
            changes["arguments"] = {**self.arguments, **changes["arguments"]}
        return replace(self, **changes)

    def __str__(self) -> str:
        """Return what is not as in the plain setting, such as ``batch_size=2 accumulation=4``."""
        plain = Setting()
        words = [f"{name}={value}" for name, value in self.arguments.items()]
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("arguments", "order", "base") and value != getattr(plain, each.name):
                words.append(f"{each.name}={value}")
        if self.order != plain.order:
            words.append(f"order={','.join(map(str, self.order[:3]))},... of {len(self.order)}")
        return " ".join(words) or "plain"
