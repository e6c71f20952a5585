"""What accelerate knows while a step runs, and after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.call import Call
from trl_hotfix.patches.beneath.transformers_divides_gradients_of_others_twice import have_accelerate_divide_by_one


def trainer(steps: int, distributed_type: str = "NO") -> Any:
    accelerator = SimpleNamespace(gradient_accumulation_steps=steps, distributed_type=distributed_type)
    return SimpleNamespace(accelerator=accelerator)


@pytest.mark.parametrize(
    ("instance", "known"),
    [(trainer(4), 1), (trainer(1), 1), (trainer(4, "DEEPSPEED"), 4), (trainer(4, "MULTI_GPU"), 1)],
)
def test_accelerate_knows_of_one_micro_batch_but_under_deepspeed(instance: Any, known: int) -> None:
    before = instance.accelerator.gradient_accumulation_steps

    def step(model: str, inputs: str) -> tuple[str, str, int]:
        return model, inputs, instance.accelerator.gradient_accumulation_steps

    call = Call(step, instance, ("model",), {"inputs": "rows"})
    assert have_accelerate_divide_by_one(call) == ("model", "rows", known)
    assert instance.accelerator.gradient_accumulation_steps == before


def test_a_step_that_fails_leaves_accelerate_as_it_was() -> None:
    instance = trainer(4)
    with pytest.raises(ZeroDivisionError):
        have_accelerate_divide_by_one(Call(lambda: 1 / 0, instance))
    assert instance.accelerator.gradient_accumulation_steps == 4
