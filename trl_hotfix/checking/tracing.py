"""What each part of a step computes, summed over its rows, to compare two ways to share them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

MASK = "attention_mask"


class Trace:
    """Notes the columns of the batches, the outputs of each module and the losses of the first step.

    Sums leave padding out. ``found`` has the order in which a step computes it.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._mask: Any = None
        self._is_on = False
        self.columns: dict[str, list[str]] = {}
        self.modules: dict[str, float] = {}
        self.losses: list[float] = []

    def install(self) -> None:
        trainer = self._trainer
        training_step = trainer.training_step

        def traced(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_on = _is_first_step(trainer)
            if self._is_on:
                self._note_columns(inputs)
            try:
                loss = training_step(model, inputs, *args, **kwargs)
            finally:
                self._is_on = False
            if _is_first_step(trainer):
                self.losses.append(float(loss))
            return loss

        trainer.training_step = traced
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.register_forward_pre_hook(self._note_mask, with_kwargs=True)
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(self._noting(name))

    def found(self) -> dict[str, Any]:
        columns = {name: sorted(each) for name, each in self.columns.items()}
        return {"columns": columns, "modules": dict(self.modules), "losses": list(self.losses)}

    def _note_mask(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if self._is_on:
            self._mask = kwargs.get("attention_mask")

    def _noting(self, name: str) -> Any:
        def note(module: Any, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            mask = self._mask
            if not self._is_on or mask is None or not hasattr(first, "dim") or first.dim() < 2:
                return
            if not first.is_floating_point() or tuple(first.shape[:2]) != tuple(mask.shape):
                return
            kept = (
                first.detach().double().abs().flatten(2).sum(-1) if first.dim() > 2 else first.detach().double().abs()
            )
            self.modules[name] = self.modules.get(name, 0.0) + float((kept * mask).sum())

        return note

    def _note_columns(self, inputs: Any) -> None:
        if not isinstance(inputs, Mapping):
            return
        import torch

        for name, value in inputs.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                continue
            rows = self.columns.setdefault(name, [])
            mask = _mask_of(name, inputs)
            has_mask = mask is not None and value.shape[:2] == mask.shape
            for number, row in enumerate(value):
                # What stands on padding is compared as well: it must say nothing, whatever its width.
                real = row[mask[number].bool()] if mask is not None and has_mask else row
                behind = row[~mask[number].bool()] if mask is not None and has_mask else row[:0]
                rows.append(_digest(real, behind, name))


def _is_first_step(trainer: Any) -> bool:
    return int(trainer.state.global_step) == 0


def _mask_of(name: str, inputs: Mapping[str, Any]) -> Any:
    """Return the mask of a column: that of its own side, or the one of the batch."""
    if MASK in name:
        return None
    # A side has its name in front of a column's, or behind it.
    sides = {other: other.replace(MASK, "").strip("_") for other in inputs if MASK in other}
    masks = [other for other, side in sides.items() if side and (name.startswith(side) or name.endswith(side))]
    return inputs.get(max(masks, key=len)) if masks else inputs.get(MASK)


def _digest(real: Any, behind: Any, name: str) -> str:
    values = real.flatten().tolist()
    if MASK in name:
        values = [each for each in values if each]
    text = repr(values)
    if name == "labels" or name.endswith("_labels"):
        text += f" and {sorted(set(behind.flatten().tolist()))}" if behind.numel() else " and [-100]"
    return f"{len(values)} {hashlib.sha256(text.encode()).hexdigest()[:12]}"
