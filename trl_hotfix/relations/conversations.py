"""Conversations of the kinds of rows that few trainers take, as forms of ``forms.FORMS``."""

from __future__ import annotations

from typing import Any

from .forms import _turn as turn
from .forms import is_form


@is_form("conversation with label")
def _labelled(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    return {**row, "prompt": turn("user", row["prompt"]), "completion": turn("assistant", row["completion"])}


@is_form("conversation of three")
def _triple(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    answers = {name: turn("assistant", row[name]) for name in ("chosen", "rejected", "reference")}
    return {"prompt": turn("user", row["prompt"]), **answers}


@is_form("conversation with context")
def _privileged(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    return {**row, "prompt": turn("user", row["prompt"])}
