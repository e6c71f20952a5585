"""Train two optimizer steps of two micro-batches with the real GRPO, whose completions call tools, and evaluate.

Of the four completions of a group two call an asynchronous tool before a synchronous one, one calls them the other way
round, and one calls none. Each answer is a word of its own, so the tokens tell the order. The completions must have the
answers in the order of the calls, in the tokens and in the messages that the reward function reads; the gradients are
compared with those of the loss on these completions, computed a row at a time and without TRL.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict
from trl_hotfix.testing import has_tools_of_rows, running_loop

import tiny

OVERLAYS = ()
PARITY = False
EQUIVALENT = {"applied twice": "the inner one finds the asynchronous tools among the synchronous ones"}

ID = "grpo-tool-answers-reordered"
TARGET = "trl.trainer.grpo_trainer:GRPOTrainer._tool_call_loop"
CALLS = (("first", "second"), ("second", "first"), (), ("first", "second", "first"))
"""What each completion of a group calls. ``first`` is asynchronous."""
IN_ORDER = (("second", "first"), ("second", "second"), (), ("first",))
"""Calls that TRL answers in order."""
GATHERED = {("first", "second"): ("second", "first"), ("first", "second", "first"): ("second", "first", "first")}
"""In what order TRL answers calls."""
STEPS, MICRO_BATCHES = 2, 2
EOS, TURN = 1, 62
"""The token that ends a message, and the word that opens one of the assistant or of a tool."""
ANSWERS = {"first": 44, "second": 47}
"""The token of each answer. Token 3 is the word w0."""


def train() -> tiny.TrainingResult:
    if not _has_asynchronous_tools():
        return tiny.TrainingResult(absent("GRPO of this release has no asynchronous tools"))
    run = _Run(CALLS)
    return tiny.result_of_runs({"GRPO": run}, run.judged())


def unaffected() -> tiny.TrainingResult:
    """Train on completions that call asynchronous tools behind synchronous ones, or tools of one kind."""
    runs = {}
    if _has_asynchronous_tools():
        run = runs["GRPO"] = _Run(IN_ORDER)
        assert run.judged().verdict is Verdict.FIXED
        assert not run.acts, "the wrapper acts"
    return tiny.result_of_runs(runs, absent("TRL answers in the order of the calls"))


def _has_asynchronous_tools() -> bool:
    from trl import GRPOTrainer

    method = getattr(GRPOTrainer, "_tool_call_loop", None)
    return method is not None and "async_coros" in inspect.unwrap(method).__code__.co_varnames


async def first() -> str:
    return f"w{ANSWERS['first'] - 3}"


def second() -> str:
    return f"w{ANSWERS['second'] - 3}"


# transformers describes a tool by its docstring, and the wheel has proofs without docstrings.
first.__doc__ = second.__doc__ = """Answer with a word.

Returns:
    A word.
"""


class _Run:
    """A run of the real trainer. The completions of a group make these calls."""

    def __init__(self, calls: tuple[tuple[str, ...], ...]) -> None:
        from trl.trainer import grpo_trainer

        self.calls = calls
        self.rewarded: list[tuple[int, list[str]]] = []
        """The number of each completion that is rewarded, and what its tools have answered."""
        with tempfile.TemporaryDirectory() as folder, running_loop() as loop:
            policy, self.policy = (tiny.llama(folder, seed=0) for _ in range(2))
            trainer = tiny.grpo(
                tiny.stepwise(_calling(grpo_trainer.GRPOTrainer, calls)),
                policy,
                reward_funcs=self._reward,
                prompts=[[{"role": "user", "content": "w1 w2"}]] * 16,
                max_completion_length=32,
                gradient_accumulation_steps=MICRO_BATCHES,
                per_device_eval_batch_size=4,
                max_steps=STEPS,
                optim="sgd",
                learning_rate=0.5,
                beta=0.0,
                num_iterations=1,
                loss_type="bnpo",
            )
            # The constructor refuses tools with a template that it does not know.
            trainer.processing_class.chat_template = tiny.chat_tokenizer().chat_template
            trainer.async_loop, trainer.tools = loop, [first, second]
            trainer._standalone_tools = trainer.tools
            asynchronous, synchronous = {"first": first}, {"second": second}
            if has_tools_of_rows(grpo_trainer.GRPOTrainer):
                trainer._sync_tool_dicts, trainer._async_tool_dicts = [synchronous] * 8, [asynchronous] * 8
            else:
                trainer._sync_tool_dict, trainer._async_tool_dict = synchronous, asynchronous
            policy.generate = _generate
            with mock.patch.object(grpo_trainer, "parse_response", _parse):
                trainer.train()
                trainer.evaluate(trainer.train_dataset.select(range(2)))
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        assert [len(step.micro_batches) for step in self.steps] == [MICRO_BATCHES] * STEPS
        assert self.evaluations
        self.acts = tiny.acts(ID, TARGET, trainer)

    def _reward(self, completions: Any, **kwargs: Any) -> list[float]:
        import torch

        # The trainer shuffles the batch after it has the rewards.
        torch.manual_seed(0)
        for row, completion in enumerate(completions):
            said = [message["content"] for message in completion if message["role"] == "tool"]
            self.rewarded.append((row % 4, said))
        return [float(row % 4) for row in range(len(completions))]

    def judged(self) -> Any:
        """Judge how many completions have their answers in order: all, or those alone that TRL gathers in order."""
        micro_batches = [*(each for step in self.steps for each in step.micro_batches), *self.evaluations]
        found = [(number, answers) for each in micro_batches for number, answers in self._answers(each.inputs)]
        found += [(number, [int(word[1:]) + 3 for word in words]) for number, words in self.rewarded]
        right = [answers == self._tokens(number, gathered=False) for number, answers in found]
        wrong = [answers == self._tokens(number, gathered=True) for number, answers in found]
        assert all(one or other for one, other in zip(right, wrong, strict=True)), found
        in_order = [self._tokens(number, gathered=True) == self._tokens(number, gathered=False) for number, _ in found]
        outcome = judge(sum(right), right=len(found), wrong=sum(in_order))
        self._compare(gathered=outcome.verdict is not Verdict.FIXED)
        return outcome

    def _tokens(self, number: int, *, gathered: bool) -> list[int]:
        calls = self.calls[number]
        return [ANSWERS[name] for name in (GATHERED.get(calls, calls) if gathered else calls)]

    def _answers(self, batch: dict[str, Any]) -> list[tuple[int, list[int]]]:
        """Return the number of each completion of a batch, and the tokens of the answers in it."""
        rows = []
        for ids, kept in zip(batch["completion_ids"], batch["completion_mask"], strict=True):
            tokens = ids[kept.bool()].tolist()
            rows.append((_number(tokens), [token for token in tokens if token in ANSWERS.values()]))
        return rows

    def _compare(self, *, gathered: bool) -> None:
        for number, step in enumerate(self.steps):
            differences = [
                step.difference(
                    tiny.expected_gradients(self.policy, step.weights, self._loss_of(step, gathered, factor))
                )
                for factor in (1 / MICRO_BATCHES, 1.0)
            ]
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            assert largest > 0.0
            assert min(differences) < 1e-5 * max(1.0, largest), (number, differences, largest)

    def _loss_of(self, step: tiny.Step, gathered: bool, factor: float) -> Callable[[Any], Any]:
        def loss(model: Any) -> Any:
            return sum(self._loss(model, each.inputs, gathered) for each in step.micro_batches) * factor

        return loss

    def _loss(self, model: Any, batch: dict[str, Any], gathered: bool) -> Any:
        """Return the mean over the tokens that the model has written, a row at a time and so without padding."""
        import torch

        gains = []
        for row, (number, _) in enumerate(self._answers(batch)):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
            answers = [part for token in self._tokens(number, gathered=gathered) for part in (TURN, token, EOS)]
            parts = [_first_turn(number), [*answers, TURN], _second_turn(number)] if answers else [_first_turn(number)]
            written = torch.tensor([place % 2 == 0 for place, part in enumerate(parts) for _ in part])
            completion = torch.tensor([token for part in parts for token in part])
            logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            log_probs = logits.log_softmax(-1).gather(1, completion[:, None])[written, 0]
            gains.append(batch["advantages"][row] * (log_probs - log_probs.detach()).exp())
        return -torch.cat(gains).mean()


def _calling(trainer_class: Any, calls: tuple[tuple[str, ...], ...]) -> Any:
    """Return a subclass whose completions of a group make these calls in their first turn."""

    class Calling(trainer_class):  # type: ignore[misc]
        def _tool_call_loop(
            self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, *args: Any
        ) -> Any:
            for ids, completion in zip(completion_ids, completions, strict=True):
                names = calls[_number(ids)]
                if names:
                    functions = [{"name": name, "arguments": {}} for name in names]
                    completion[0]["tool_calls"] = [{"type": "function", "function": each} for each in functions]
            return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *args)

    return Calling


def _parse(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the message behind the answers. It calls no tool."""
    return {"role": "assistant", "content": "w9"}


def _first_turn(number: int) -> list[int]:
    return [10 + number, *(20 + place for place in range(number)), EOS]


def _second_turn(number: int) -> list[int]:
    return [*(30 + number + place for place in range(4 - number)), EOS]


def _number(tokens: list[int]) -> int:
    """Return which completion of its group this is. The trainer shuffles them; their first tokens tell it."""
    return tokens[0] - 10


def _generate(input_ids: Any, **kwargs: Any) -> Any:
    """Write the first turn of a completion behind a prompt, and the second one behind answers."""
    import torch

    rows = []
    for row, tokens in enumerate(input_ids.tolist()):
        begun = [token - 10 for token in tokens if 10 <= token < 14]
        rows.append(_second_turn(begun[0]) if begun else _first_turn(row % 4))
    longest = max(map(len, rows))
    written = [[*tokens, *[0] * (longest - len(tokens))] for tokens in rows]
    return torch.cat([input_ids, torch.tensor(written)], dim=1)
