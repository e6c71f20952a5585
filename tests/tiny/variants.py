"""The variant that a run trains in, and what the run has trained: state that helpers and the bench share.

Read and set it on ``tiny.state``. ``tiny.variant`` and the other fields can be read on the package, not set there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class State:
    """What the bench asks of all models and trainers, and what they record for it."""

    variant: str = ""
    """Set by ``tests/bench/variants.py``: ``compiled``, ``lora``, ``full``, or ``eager``, the run to compare with."""

    compiler: str = "aot_eager"
    """The backend of ``torch.compile`` in the variant ``compiled``."""

    overrides: dict[str, Any] = field(default_factory=dict)
    """Config fields that win over those of the caller of ``config``. Set by ``tests/bench/curves.py``."""

    trained: set[str] = field(default_factory=set)
    """The kinds of models that were trained: all weights (``full``) or adapters (``lora``)."""

    fingerprints: list[str] = field(default_factory=list)
    """Fingerprints of the datasets that trainers made by ``trainer`` have prepared: keys in the ``datasets`` cache."""


state = State()
