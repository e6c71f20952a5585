"""The forward that scores without Triton is beneath TRL's, once, and looks like the model's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from trl_hotfix.authoring import Call
from trl_hotfix.patches.heads import fused_lm_head_crash_without_triton as patch

_ChunkedLogProbFunction: Any = None
"""What TRL's module has where Triton cannot be imported."""


class Model:
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return input_ids


def add_fused_lm_head(model: Any) -> None:
    own = model.forward.__func__

    @wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _ChunkedLogProbFunction

    model.forward = MethodType(forward, model)


def add_twice(model: Any) -> None:
    """As where another patch has put its own forward around TRL's, with something of its own in its closure."""
    add_fused_lm_head(model)
    fused, others = model.forward.__func__, inspect.cleandoc
    model.forward = MethodType(wraps(fused)(_calling(fused, others)), model)


def _calling(fused: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (fused(*args, **kwargs), others(""))[0]


def test_generate_reads_the_signature_of_the_models_own_forward() -> None:
    model = Model()
    patch.score_in_torch(Call(add_fused_lm_head, None, (model,), {}))
    assert list(inspect.signature(model.forward).parameters) == ["input_ids", "labels"]
    assert model.forward(1) is patch._TorchLogProbFunction
    assert _ChunkedLogProbFunction is None


def test_the_forward_beneath_another_one_is_replaced_and_the_other_stays() -> None:
    model = Model()
    patch.score_in_torch(Call(add_twice, None, (model,), {}))
    assert model.forward(1) is patch._TorchLogProbFunction
    assert model.forward.__func__.__globals__ is globals()
