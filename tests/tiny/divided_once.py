"""The tests that both patches of transformers' second division share; the file of a patch says which it tests.

The two patches have the same wrapper, on trainers with a step of their own and on those with transformers'.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.call import Call
from trl_hotfix.witness import Count

from .divided_twice import DividedRun

by_tokens = pytest.mark.parametrize("tokens", [False, True], ids=["by micro-batches", "by tokens"])


def trainer_with(steps: int, distributed_type: str) -> Any:
    accelerator = SimpleNamespace(gradient_accumulation_steps=steps, distributed_type=distributed_type)
    return SimpleNamespace(accelerator=accelerator)


class DividedOnce:
    """The tests of one patch. Its file has a fixture ``target``, and a subclass with the wrapper of the patch."""

    wrapper: Any

    @by_tokens
    def test_each_micro_batch_of_each_step_is_divided_once(self, target: Any, tokens: bool) -> None:
        run = DividedRun(target, by_tokens=tokens)
        # The last step of an epoch has one micro-batch.
        for number, in_step in ((1, 2), (2, 2), (3, 1)):
            assert run.gradient(number, in_step) == number / (4 if tokens else in_step)
            assert run.known == 2
        assert run.known_in_loss == [1, 1, 1]
        assert run.acts == 3

    @by_tokens
    def test_transformers_alone_divides_twice_and_logs_the_same(self, target: Any, tokens: bool, switch: Any) -> None:
        with switch.off():
            run = DividedRun(target, by_tokens=tokens)
            assert run.gradient(1, 2) == (1 / 8 if tokens else 1 / 4)
            logged = run.micro_batch(3, 2)
        assert DividedRun(target, by_tokens=tokens).micro_batch(3, 2) == logged == 0.5 * 3 / (4 if tokens else 2)

    def test_gradients_add_up_to_those_of_the_mean(self, target: Any) -> None:
        run = DividedRun(target, steps=4)
        for number in (1, 2, 3, 6):
            run.micro_batch(number, 4)
        assert float(run.weight.grad) == 3

    def test_two_trainers_are_divided_each_by_its_own_number(self, target: Any) -> None:
        one, other = DividedRun(target, steps=2), DividedRun(target, steps=4)
        assert [one.gradient(8, 2), other.gradient(8, 4), one.gradient(4, 2)] == [4, 2, 2]
        assert (one.known, other.known) == (2, 4)

    def test_a_step_of_one_micro_batch_stays(self, target: Any) -> None:
        run = DividedRun(target, steps=1)
        assert run.gradient(5, 1) == 5
        assert not run.acts

    def test_deepspeed_divides_by_nothing_and_knows_the_number(self, target: Any) -> None:
        run = DividedRun(target, distributed_type="DEEPSPEED")
        assert run.gradient(1, 2) == 0.5
        assert run.known_in_loss == run.known_to_the_engine == [2]
        assert not run.acts

    def test_the_loss_is_computed_once_of_what_it_was(self, target: Any) -> None:
        run = DividedRun(target, by_tokens=True)
        run.micro_batch(3, 2)
        assert run.computed == [(run.trainer.model, {"number": 3}, 4)]

    def test_a_step_that_fails_leaves_accelerate_what_it_knew(self, target: Any) -> None:
        run = DividedRun(target)
        with pytest.raises(KeyError):
            run.trainer.training_step(run.trainer.model, {}, None)
        assert run.known == 2

    @pytest.mark.parametrize(
        ("steps", "distributed_type", "known"),
        [(4, "NO", 1), (4, "MULTI_GPU", 1), (4, "FSDP", 1), (1, "NO", 1), (4, "DEEPSPEED", 4), (1, "DEEPSPEED", 1)],
    )
    def test_accelerate_knows_of_one_micro_batch_but_under_deepspeed(
        self, steps: int, distributed_type: str, known: int
    ) -> None:
        trainer = trainer_with(steps, distributed_type)

        def step(model: str, inputs: str) -> tuple[str, str, int]:
            return model, inputs, trainer.accelerator.gradient_accumulation_steps

        call, count = Call(step, trainer, ("model",), {"inputs": "rows"}), Count()
        result = self.wrapper(call)
        call.end(count, result)
        assert result == ("model", "rows", known)
        assert count.acted == (known != steps)
        assert trainer.accelerator.gradient_accumulation_steps == steps
