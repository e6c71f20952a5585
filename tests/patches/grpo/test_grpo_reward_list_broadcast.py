"""A reward function returns a reward for each completion, or the run ends with an error that tells what it returned."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import SequenceClassifierOutput
from trl.trainer import grpo_trainer, rloo_trainer

from trl_hotfix.testing import (
    StopConstruction,
    scored_completions,
    single_process,
    stub_that_scores,
    tiny_attention_model,
    tiny_causal_lm,
)

COMPLETIONS = ((5, 1), (10, 3, 4, 1), (8, 9, 1), (3, 11, 4, 5, 1))
RIGHT, OTHERS, ONE = [0.5, 2.0, -1.0, 3.0], [3.0, 1.0, 2.0, 5.0], 4.0

each_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


@pytest.fixture(params=[grpo_trainer, rloo_trainer], ids=["GRPO", "RLOO"])
def module(request: pytest.FixtureRequest) -> Any:
    if request.param is rloo_trainer and not hasattr(rloo_trainer.RLOOTrainer, "_calculate_rewards"):
        pytest.skip("RLOO of this release scores completions in no method of its own")
    return request.param


@pytest.fixture
def loop(module: ModuleType) -> Iterator[Any]:
    """Return an event loop that runs in a thread of its own, as trainers have one for asynchronous functions."""
    if "async_funcs_info" not in names_in(module):
        pytest.skip("this release takes no asynchronous reward functions")
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever, daemon=True)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


def names_in(module: ModuleType) -> set[str]:
    """Return the names in the method that calls the reward functions, from 0.16 on."""
    trainer_class = module.GRPOTrainer if module is grpo_trainer else module.RLOOTrainer
    methods = ("_calculate_rewards", "_generate_and_score_completions", "compute_loss")
    method = next(getattr(trainer_class, name) for name in methods if hasattr(trainer_class, name))
    code = inspect.unwrap(method).__code__
    return {*code.co_names, *code.co_varnames, *code.co_cellvars}


def function(value: Any, name: str = "first", calls: list[str] | None = None) -> Any:
    """Return a reward function that returns ``value``, or what this returns, and keeps its name in ``calls``."""

    def reward(completions: Any, **kwargs: Any) -> Any:
        if calls is not None:
            calls.append(name)
        return value() if callable(value) else value

    reward.__name__ = name
    return reward


def asynchronous(value: Any, name: str) -> Any:
    async def reward(completions: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return value

    reward.__name__ = name
    return reward


def reward_model(rewards: list[float]) -> Any:
    model = tiny_attention_model()
    # The length of such an output is 1.
    model.forward = lambda **kwargs: SequenceClassifierOutput(logits=torch.tensor(rewards)[:, None])
    return model


def stub(module: ModuleType, *functions: Any, rows: int = 4, training: bool = True, loop: Any = None) -> Any:
    model = tiny_causal_lm(vocabulary=16)
    trainer = stub_that_scores(
        module,
        COMPLETIONS[:rows],
        [0.0] * rows,
        model=model,
        reference=model,
        training=training,
        # 0.14.0 leaves it to the model to answer a prompt several times.
        num_generations=1,
        num_generations_eval=1,
        beta=0.0,
    )
    token = torch.zeros(rows, 1, dtype=torch.long)
    vars(trainer).update(
        reward_funcs=list(functions),
        reward_func_names=["first", "second"][: len(functions)],
        reward_processing_classes=[lambda *texts, **kwargs: {"input_ids": token}] * len(functions),
        reward_weights=torch.ones(len(functions)),
        async_loop=loop,
        async_reward_loop=loop,
    )
    return trainer


def rewards_of(trainer: Any) -> list[list[float]]:
    """Return the rewards by function, as the trainer gathers them from all ranks."""
    module, rows, found = sys.modules[type(trainer).__mro__[1].__module__], trainer.scored_rows, []

    def gather(values: Any) -> Any:
        if isinstance(values, torch.Tensor) and values.shape == (rows, len(trainer.reward_funcs)):
            found.append(values.tolist())
        return values

    trainer.accelerator.gather_for_metrics = gather
    inputs = [{"prompt": "a"}] * rows
    with pytest.MonkeyPatch.context() as patching:
        if hasattr(module, "gather"):
            patching.setattr(module, "gather", gather)
        with single_process(module):
            if hasattr(trainer, "_calculate_rewards"):
                trainer._calculate_rewards(inputs, ["a"] * rows, ["b"] * rows, [[5]] * rows)
            elif hasattr(trainer, "_get_per_token_logps"):
                scored_completions(trainer)
            else:
                trainer.compute_loss(trainer.model, inputs)
    return [list(column) for column in zip(*found[0], strict=True)]


def refused(name: str, number: str, completions: int = 4) -> Any:
    """Expect the error that names a function, how many rewards it returned, and for how many completions."""
    text = f"^the reward function '{name}' returned {number} for {completions} completions; it must return one for each"
    return pytest.raises(ValueError, match=text)


@each_mode
def test_one_reward_for_all_completions_is_refused(module: ModuleType, training: bool) -> None:
    with refused("first", "1 reward"):
        rewards_of(stub(module, function([ONE]), training=training))


def test_the_error_names_the_function_that_is_wrong(module: ModuleType) -> None:
    right, wrong = function(RIGHT[:3], "right"), function([ONE], "wrong")
    for functions in ([right, wrong], [wrong, right]):
        with refused("wrong", "1 reward", 3):
            rewards_of(stub(module, *functions, rows=3))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (ONE, "1 reward"),
        (4, "1 reward"),
        (torch.tensor(ONE), "1 reward"),
        ([None], "1 reward"),
        ([torch.tensor(ONE)], "1 reward"),
        (torch.tensor([ONE]), "1 reward"),
        ([[ONE]], "1 reward"),
        (lambda: iter([ONE]), "1 reward"),
        ([], "0 rewards"),
        (RIGHT[:3], "3 rewards"),
        ([*RIGHT, ONE], "5 rewards"),
        (torch.tensor([[*RIGHT, ONE]]), "5 rewards"),
    ],
)
def test_another_number_of_rewards_is_refused_whatever_has_them(module: ModuleType, value: Any, number: str) -> None:
    with refused("first", number):
        rewards_of(stub(module, function(value)))


def test_an_asynchronous_function_with_one_reward_is_refused(module: ModuleType, loop: Any) -> None:
    with refused("second", "1 reward"):
        rewards_of(stub(module, function(RIGHT), asynchronous([ONE], "second"), loop=loop))


def test_an_object_that_is_called_is_refused_by_its_class(module: ModuleType) -> None:
    if not hasattr(stub(module), "_calculate_rewards"):
        pytest.skip("this release asks a reward function for its name")

    class Judge:
        def __call__(self, completions: Any, **kwargs: Any) -> list[float]:
            return [ONE]

    with refused("Judge", "1 reward"):
        rewards_of(stub(module, Judge()))


def test_each_generation_of_each_trainer_is_counted(module: ModuleType) -> None:
    values = [RIGHT]
    trainers = [stub(module, function(lambda: values[0])) for _ in range(2)]
    for step, value in enumerate((RIGHT, [ONE], OTHERS, [ONE])):
        values[0] = value
        for trainer in trainers:
            trainer.state.global_step = step
            if value == [ONE]:
                with refused("first", "1 reward"):
                    rewards_of(trainer)
            else:
                assert rewards_of(trainer) == [value]


@each_mode
@pytest.mark.parametrize("value", [RIGHT, torch.tensor(RIGHT), [RIGHT]], ids=["list", "tensor", "row"])
def test_a_reward_for_each_completion_is_handed_on(module: ModuleType, value: Any, training: bool) -> None:
    calls: list[str] = []
    assert rewards_of(stub(module, function(value, calls=calls), training=training)) == [RIGHT]
    assert calls == ["first"]


class Rewards:
    """Rewards without a length, which can be read again and again."""

    def __iter__(self) -> Iterator[float]:
        return iter(RIGHT)


@pytest.mark.parametrize("value", [lambda: iter(RIGHT), Rewards], ids=["iterator", "iterable"])
def test_rewards_without_a_length_are_handed_on(module: ModuleType, value: Any) -> None:
    if "isnan" not in names_in(module):
        pytest.skip("this release does not take the rewards one by one")
    assert rewards_of(stub(module, function(value))) == [RIGHT]


def test_a_tensor_of_one_row_is_handed_on(module: ModuleType) -> None:
    if "isnan" in names_in(module):
        pytest.skip("this release takes the rewards one by one")
    assert rewards_of(stub(module, function(torch.tensor([RIGHT])))) == [RIGHT]


def test_one_reward_for_one_completion_is_handed_on(module: ModuleType) -> None:
    assert rewards_of(stub(module, function([ONE]), rows=1)) == [[ONE]]


def test_the_rewards_of_two_functions_are_handed_on(module: ModuleType) -> None:
    calls: list[str] = []
    trainer = stub(module, function(RIGHT, calls=calls), function(OTHERS, "second", calls))
    assert rewards_of(trainer) == [RIGHT, OTHERS]
    assert calls == ["first", "second"]


def test_the_rewards_of_an_asynchronous_function_are_handed_on(module: ModuleType, loop: Any) -> None:
    trainer = stub(module, function(RIGHT), asynchronous(OTHERS, "second"), loop=loop)
    assert rewards_of(trainer) == [RIGHT, OTHERS]


def test_a_reward_model_is_called_as_it_is(module: ModuleType) -> None:
    assert rewards_of(stub(module, function(OTHERS), reward_model(RIGHT))) == [OTHERS, RIGHT]


@pytest.mark.parametrize("value", [None, object()], ids=["None", "object"])
def test_what_are_no_rewards_is_left_to_trls_own_error(module: ModuleType, value: Any) -> None:
    with pytest.raises((TypeError, RuntimeError)):
        rewards_of(stub(module, function(value)))


@pytest.mark.parametrize("value", [RIGHT, [ONE]], ids=["handed on", "refused"])
def test_the_trainer_keeps_its_reward_functions(module: ModuleType, value: Any) -> None:
    trainer = stub(module, function(value))
    functions = trainer.reward_funcs
    if value is RIGHT:
        rewards_of(trainer)
    else:
        with refused("first", "1 reward"):
            rewards_of(trainer)
    assert trainer.reward_funcs is functions


def test_a_trainer_without_reward_functions_gets_to_generate() -> None:
    if hasattr(grpo_trainer.GRPOTrainer, "_calculate_rewards"):
        pytest.skip("this release computes the rewards in a method of their own")
    trainer = stub(grpo_trainer)
    del trainer.reward_funcs

    def stop(*args: Any, **kwargs: Any) -> None:
        raise StopConstruction

    trainer.model.generate = stop
    with pytest.raises(StopConstruction):
        rewards_of(trainer)


@each_mode
def test_trl_spreads_the_one_reward(module: ModuleType, training: bool, switch: Any) -> None:
    with switch.off():
        assert rewards_of(stub(module, function([ONE]), training=training)) == [[ONE] * 4]


def test_trl_spreads_the_one_reward_of_an_asynchronous_function(module: ModuleType, loop: Any, switch: Any) -> None:
    with switch.off():
        trainer = stub(module, function(RIGHT), asynchronous([ONE], "second"), loop=loop)
        assert rewards_of(trainer) == [RIGHT, [ONE] * 4]
