"""GRPO and RLOO spread the one reward that a reward function returns over all completions.

``rewards_per_func[:, i] = torch.tensor(...)`` in ``_calculate_rewards``, up to 0.18 in the method that generates, takes
a list of one number for every number of completions. TRL 1.10.0 counts the rewards before, and raises a ``ValueError``.

The wrapper lets TRL call each reward function through a view that counts what it returns. The error is raised within
TRL's method, as that of the function itself would be, so that it ends the run and does not switch the patch off.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from ...authoring import absent, act_of_this_call, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import scored_completions, single_process, stub_that_scores, tiny_attention_model, tiny_causal_lm


def refuse_another_number_of_rewards(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Raise if a reward function does not return a reward for each completion. Reward models always do."""
    from torch import nn

    # Nothing else is changed, and a call that raises is not counted.
    act_of_this_call()
    # What generates and scores in one method may be a stand-in that only generates.
    functions = getattr(instance, "reward_funcs", ())
    functions = [function if isinstance(function, nn.Module) else _counted(function) for function in functions]
    with shadowed(instance, "reward_funcs", functions):
        return wrapped(*args, **kwargs)


def _counted(function: Any) -> Any:
    """Return a view of a reward function, asynchronous or not, that refuses another number of rewards."""
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            rewards, completions = self.__wrapped__(*args, **kwargs), len(kwargs["completions"])
            if inspect.isawaitable(rewards):
                return self._awaited(rewards, completions)
            return self._checked(rewards, completions)

        async def _awaited(self, rewards: Any, completions: int) -> Any:
            return self._checked(await rewards, completions)

        def _checked(self, rewards: Any, completions: int) -> Any:
            counted = rewards
            if isinstance(rewards, Iterator):
                rewards, copy = itertools.tee(rewards)
                counted = list(copy)
            number = _number_of(counted)
            if number is not None and number != completions:
                name = getattr(self, "__name__", type(self.__wrapped__).__name__)
                raise ValueError(
                    f"the reward function {name!r} returned {number} reward{'s' * (number != 1)} for {completions} "
                    "completions; it must return one for each (trl_hotfix: grpo-reward-list-broadcast)"
                )
            return rewards

    return View(function)


def _number_of(rewards: Any) -> int | None:
    """Return how many rewards these are, or None if they are not such as TRL takes."""
    if isinstance(rewards, (int, float)) or getattr(rewards, "ndim", None) == 0:
        return 1
    if not hasattr(rewards, "__len__"):
        return None
    if len(rewards) == 1:
        (only,) = rewards
        # A tensor of shape (1, n) has been right.
        is_row = hasattr(only, "__len__") and getattr(only, "ndim", None) != 0
        return len(only) if is_row else 1
    return len(rewards)


_COMPLETIONS = ((5, 1), (10, 3, 4, 1), (8, 9, 1), (3, 11, 4, 5, 1))
_RIGHT = [0.5, 2.0, -1.0, 3.0]
_ONE = 4.0
_NAMES = ("first", "second")


def one_reward_is_not_spread(module: ModuleType) -> Outcome:
    """Count the generations that are refused because a function returns one reward for all their completions."""
    scored_in = _scored_in(module)
    if scored_in is None:
        return absent("this release scores completions in no method of its own")
    if "were expected (one per prompt-completion pair)" in str(inspect.unwrap(scored_in).__code__.co_consts):
        return absent("this release counts the rewards")
    wrong = _wrong(module)
    measured = sum(case.is_refused() for case in wrong)
    outcome = judge(float(measured), right=float(len(wrong)), wrong=0.0)
    for case in _right(module):
        case.has_its_rewards()
    if outcome.verdict is Verdict.FIXED:
        for case in _refused_by_trl_too(module):
            case.is_refused()
        _is_left_to_trl(_Case(module, [lambda: None]))
    return outcome


def _scored_in(module: ModuleType) -> Any:
    """Return the method that computes the rewards. RLOO before 0.22 is another trainer."""
    if not hasattr(module, "GRPOTrainer"):
        return getattr(module.RLOOTrainer, "_calculate_rewards", None)
    names = ("_calculate_rewards", "_generate_and_score_completions", "_prepare_inputs")
    return next(getattr(module.GRPOTrainer, name) for name in names if hasattr(module.GRPOTrainer, name))


def _takes_asynchronous(module: ModuleType) -> bool:
    return "async_funcs_info" in str(inspect.unwrap(_scored_in(module)).__code__.co_varnames) or (
        "async_funcs_info" in inspect.unwrap(_scored_in(module)).__code__.co_cellvars
    )


def _wrong(module: ModuleType) -> list[_Case]:
    """Return generations in which one function returns one reward, which becomes that of all completions."""
    cases = [
        _Case(module, [[_ONE]], [[_ONE] * 4]),
        _Case(module, [_RIGHT, [_ONE]], [_RIGHT, [_ONE] * 4], training=False),
        _Case(module, [[_ONE], _RIGHT[:3]], [[_ONE] * 3, _RIGHT[:3]]),
    ]
    if _takes_asynchronous(module):
        cases.append(_Case(module, [_RIGHT, [_ONE]], [_RIGHT, [_ONE] * 4], last="asynchronous"))
    return cases


def _right(module: ModuleType) -> list[_Case]:
    """Return generations in which each completion has its reward."""
    import torch

    kinds: list[Any] = [_RIGHT, torch.tensor(_RIGHT), [_RIGHT]]
    # From 0.16 on the rewards are taken out one by one, since one of them may be None.
    one_by_one = "isnan" in inspect.unwrap(_scored_in(module)).__code__.co_names
    kinds.append((lambda: iter(_RIGHT)) if one_by_one else torch.tensor([_RIGHT]))
    cases = [_Case(module, [kind], [_RIGHT], training=bool(index % 2)) for index, kind in enumerate(kinds)]
    cases += [_Case(module, [[_ONE]], [[_ONE]]), _Case(module, [_RIGHT, _RIGHT[::-1]], [_RIGHT, _RIGHT[::-1]])]
    cases.append(_Case(module, [_RIGHT[::-1], _RIGHT], [_RIGHT[::-1], _RIGHT], last="model"))
    if _takes_asynchronous(module):
        cases.append(_Case(module, [_RIGHT, _RIGHT[::-1]], [_RIGHT, _RIGHT[::-1]], last="asynchronous"))
    return cases


def _refused_by_trl_too(module: ModuleType) -> list[_Case]:
    """Return what TRL's own code refuses in some releases or in all, in words that do not tell what is wrong."""
    import torch

    ones: list[Any] = [_ONE, 4, torch.tensor(_ONE), lambda: iter([_ONE]), [None], [torch.tensor(_ONE)], [[_ONE]]]
    cases = [_Case(module, [one]) for one in ones]
    return [*cases, _Case(module, [[]], number="0 rewards"), _Case(module, [[*_RIGHT, _ONE]], number="5 rewards")]


def _is_left_to_trl(case: _Case) -> None:
    try:
        case.rewards()
    except (TypeError, RuntimeError):
        return
    raise AssertionError("no rewards at all are no error")


class _Case:
    """A generation whose reward functions return ``values``, or what these return, and the rewards by function.

    ``last`` tells what the last function is; ``number`` is what the error says of the one that is not ``_RIGHT``.
    """

    def __init__(
        self,
        module: ModuleType,
        values: Sequence[Any],
        expected: Sequence[Sequence[float]] | None = None,
        *,
        last: str = "function",
        training: bool = True,
        number: str = "1 reward",
    ) -> None:
        import torch

        self.module, self.values, self.expected, self.number = module, values, expected, number
        self.rows, self.calls = len(expected[0]) if expected else 4, 0
        scored = stub_that_scores(module, _COMPLETIONS[: self.rows], [0.0] * self.rows, training=training, beta=0.0)
        makers = [self._function] * (len(values) - 1) + [getattr(self, f"_{last}")]
        token = torch.zeros(self.rows, 1, dtype=torch.long)
        vars(scored).update(
            reward_funcs=[make(index) for index, make in enumerate(makers)],
            reward_func_names=list(_NAMES[: len(values)]),
            reward_processing_classes=[lambda *texts, **kwargs: {"input_ids": token}] * len(values),
            reward_weights=torch.ones(len(values)),
        )
        self.trainer = scored

    def _value(self, index: int) -> Any:
        self.calls += 1
        value = self.values[index]
        return value() if callable(value) else value

    def _function(self, index: int) -> Any:
        def function(completions: Any, **kwargs: Any) -> Any:
            return self._value(index)

        function.__name__ = _NAMES[index]
        return function

    def _asynchronous(self, index: int) -> Any:
        async def function(completions: Any, **kwargs: Any) -> Any:
            return self._value(index)

        function.__name__ = _NAMES[index]
        return function

    def _model(self, index: int) -> Any:
        import torch
        from transformers.modeling_outputs import SequenceClassifierOutput

        model = tiny_attention_model()
        # Such an output has a length, which is 1.
        model.forward = lambda **kwargs: SequenceClassifierOutput(logits=torch.tensor(self._value(index))[:, None])
        return model

    def is_refused(self) -> bool:
        """Return whether the error tells who returned how many. Otherwise the rewards must be the expected ones."""
        names = [name for name, value in zip(_NAMES, self.values, strict=False) if value is not _RIGHT]
        try:
            self.has_its_rewards()
        except ValueError as error:
            if f"{names[0]!r} returned {self.number} for {self.rows} completions;" not in str(error):
                raise
            return True
        return False

    def has_its_rewards(self) -> None:
        rewards = self.rewards()
        if rewards != self.expected or self.calls != len(self.values):
            raise AssertionError(f"{self.values} became {rewards} in {self.calls} calls")

    def rewards(self) -> list[list[float]]:
        """Return the rewards by function, as the trainer gathers them from all ranks."""
        import torch

        found: list[Any] = []

        def gather(values: Any) -> Any:
            if isinstance(values, torch.Tensor) and values.shape == (self.rows, len(self.values)):
                found.append(values.clone())
            return values

        functions = self.trainer.reward_funcs
        self.trainer.accelerator.gather_for_metrics = gather
        with ExitStack() as stack:
            if hasattr(self.module, "gather"):
                stack.enter_context(shadowed(self.module, "gather", gather))
            if inspect.iscoroutinefunction(functions[-1]):
                self.trainer.async_loop = self.trainer.async_reward_loop = stack.enter_context(_running_loop())
            try:
                self._score()
            finally:
                if self.trainer.reward_funcs is not functions:
                    raise AssertionError("the trainer is left with other reward functions")
        return [column.tolist() for column in found[0].T]

    def _score(self) -> None:
        trainer, rows = self.trainer, self.rows
        with single_process(self.module):
            if hasattr(trainer, "_calculate_rewards"):
                trainer._calculate_rewards([{"prompt": "a"}] * rows, ["a"] * rows, ["b"] * rows, [[5]] * rows)
            elif hasattr(trainer, "_get_per_token_logps"):
                scored_completions(trainer)
            else:
                # 0.14.0 leaves it to the model to answer a prompt several times, and does not name its token ids.
                model, generate = tiny_causal_lm(vocabulary=16), trainer.model.generate
                model.generate = lambda input_ids, **kwargs: generate(input_ids.expand(rows, -1))
                trainer.ref_model = trainer.model = model
                trainer.compute_loss(model, [{"prompt": "a"}])


@contextmanager
def _running_loop() -> Iterator[Any]:
    """Give an event loop that runs in a thread of its own, as the trainer makes one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
