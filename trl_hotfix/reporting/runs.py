"""The runs of this process: which known bugs the arguments of each trainer hit, for the report.

The callback notes them when training begins. It holds trainers weakly.
"""

from __future__ import annotations

import weakref
from typing import Any

from msgspec import Struct

from ..matching.hits import Answer


class RunHit(Struct, frozen=True):
    """A known bug of the installed TRL that a run hits or may hit.

    ``because`` has the arguments that decide, ``unknown`` what stays open even when everything is known.
    """

    id: str
    title: str
    severity: str
    answer: Answer
    symptom: str
    because: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for a record or a report, without the title, which the catalogue has."""
        return {
            "id": self.id,
            "severity": self.severity,
            "answer": self.answer.value,
            "symptom": self.symptom,
            "because": list(self.because),
            "unknown": list(self.unknown),
        }


class Run(Struct, frozen=True):
    """A trainer that has begun to train or to evaluate, by the name of its class, with the bugs that it may have."""

    trainer: str
    hits: tuple[RunHit, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"trainer": self.trainer, "hits": [hit.to_dict() for hit in self.hits]}


_runs: list[tuple[weakref.ref[Any], Run]] = []


def note(trainer: Any, hits: tuple[RunHit, ...]) -> None:
    """Note which bugs the run that begins hits. An earlier run of the same trainer is forgotten."""
    name = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
    kept = [(reference, run) for reference, run in list(_runs) if _is_of_another(reference(), trainer)]
    _runs[:] = [*kept, (weakref.ref(trainer), Run(name, hits))]


def noted() -> tuple[Run, ...]:
    """Return the runs of the trainers that still exist, the newest last."""
    return tuple(run for reference, run in list(_runs) if reference() is not None)


def _is_of_another(found: Any, trainer: Any) -> bool:
    # A trainer may be a dataclass, which is equal to another.
    return found is not None and found is not trainer
