"""How many rows a step has, and in which batches: the user's, cut to a size for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STEP = 8
"""The rows of a step."""

STEPS = 2
"""The steps of a run."""

ROWS = 32
"""The rows of a dataset: two steps, and some for what a trainer leaves out."""

GROUP = 4
"""At most so many completions of a prompt."""

_BATCH, _TIMES = "per_device_train_batch_size", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Shape:
    """``rows`` of a step in ``batch_size`` x ``accumulation``. ``group``: the completions of a prompt, or 1."""

    batch_size: int
    accumulation: int
    group: int = 1
    whole_groups: bool = False

    @property
    def rows(self) -> int:
        return self.batch_size * self.accumulation

    def others(self) -> list[tuple[int, int]]:
        """Return two other ways to share the rows of a step, the farthest first."""
        ways = [(self.rows // times, times) for times in (1, 2, 4, 8) if self.rows % times == 0]
        fit = [way for way in ways if not self.whole_groups or way[0] % self.group == 0]
        others = [way for way in fit if way != (self.batch_size, self.accumulation) and way[0] > 1]
        others.sort(key=lambda way: abs(way[1] - self.accumulation), reverse=True)
        return others[:2]


def shape_of(arguments: Mapping[str, Any], fields: Mapping[str, Any]) -> Shape:
    """Return the shape for a config's arguments. ``fields`` has the default of each field of its class."""

    def value(name: str, default: Any) -> Any:
        given = arguments.get(name, fields.get(name, default))
        return given if isinstance(given, int) and given > 0 else default

    batch_size, times = value(_BATCH, 8), value(_TIMES, 1)
    group = value("num_generations", 1) if "num_generations" in fields else 1
    if group > 1:
        group = group if group <= GROUP else GROUP
        # Early releases need whole groups in each batch.
        whole_groups = "steps_per_generation" not in fields
        rows = STEP if STEP % group == 0 else 2 * group
        split = times > 1 and not (whole_groups and (rows // 2) % group)
        return Shape(rows // 2 if split else rows, 2 if split else 1, group, whole_groups)
    if times == 1:
        return Shape(STEP, 1)
    return Shape(1, STEP) if batch_size == 1 else Shape(STEP // 2, 2)


def as_arguments(shape: Shape, batch_size: int, accumulation: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that give this shape, shared into these batches (0: as in the shape)."""
    changed: dict[str, Any] = {_BATCH: batch_size or shape.batch_size, _TIMES: accumulation or shape.accumulation}
    if shape.group > 1:
        changed["num_generations"] = shape.group
    for name in ("per_device_eval_batch_size",):
        if name in fields:
            changed[name] = max(shape.group, 4)
    return changed


STALE = ("steps_per_generation", "generation_batch_size", "num_generations_eval")
"""Fields that a config computes from its batches: a step generates for itself."""
