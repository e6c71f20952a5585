"""A2PO beside its formula, for each of several ways to tokenize the prompts of a batch.

What is generated depends on every token of the prompt, and on whether it ends in padding, as that of a model does; so
the rewards and the optimal values do, too.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_hotfix.authoring import judge
from trl_hotfix.model import Outcome, Verdict

from .models import llama
from .steps import acts, expected_gradients, stepwise
from .trainers import classes, config, trainer

STEPS, MICRO_BATCHES, ROWS, EVALUATED, SAMPLES, BETA, EOS = 2, 2, 3, 2, 3, 0.5, 1

Row = tuple[list[int], list[int]]
"""The ids of a prompt as the model is given them, and their mask."""
Kinds = Mapping[str, Callable[[list[list[int]]], list[Row]]]
"""The right and the wrong way to tokenize the prompts of a batch, of which the ids are given."""

PROMPTS = tuple(
    " ".join(f"w{(5 * row + 3 * place) % 56}" for place in range(1 + row * row % 7))
    for row in range(STEPS * MICRO_BATCHES * ROWS + EVALUATED)
)
"""The prompts of all micro-batches, and those of the evaluation."""


class A2poRun:
    """Two optimizer steps of two micro-batches, and an evaluation."""

    def __init__(
        self, patch_id: str, kinds: Kinds, tokenizer: Any, prompts: Sequence[str] = PROMPTS, **settings: Any
    ) -> None:
        from datasets import Dataset

        trainer_class, config_class = classes("A2PO")
        batches = list[list[str]]()

        class Recorder(stepwise(trainer_class)):  # type: ignore[misc]
            def _prepare_inputs(self, inputs: Any) -> Any:
                batches.append([row["prompt"] for row in inputs])
                return super()._prepare_inputs(inputs)

        trained, evaluated = prompts[:-EVALUATED], prompts[-EVALUATED:]
        fixed: dict[str, Any] = {"gradient_accumulation_steps": MICRO_BATCHES, "max_steps": STEPS, "optim": "sgd"}
        fixed |= {"learning_rate": 0.5, "per_device_train_batch_size": ROWS, "per_device_eval_batch_size": ROWS}
        fixed |= {"beta1": BETA, "beta2": BETA, "num_value_samples": SAMPLES, "filter_all_incorrect": False}
        with tempfile.TemporaryDirectory() as folder:
            policy, self._policy, self._reference = (llama(folder, seed=0) for _ in range(3))
            policy.generate = _generate
            a2po = trainer(
                Recorder,
                model=policy,
                reward_funcs=lambda completions, **kwargs: [_reward(_words_of(text)) for text in completions],
                args=config(config_class, **fixed, **settings),
                train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in trained]),
                eval_dataset=Dataset.from_list([{"prompt": prompt} for prompt in evaluated]),
                tokenizer=tokenizer,
            )
            sides = tokenizer.padding_side, tokenizer.truncation_side
            a2po.train()
            a2po.evaluate()
        assert a2po.processing_class is tokenizer
        assert (tokenizer.padding_side, tokenizer.truncation_side) == sides
        self.steps, self.evaluations, self._batches = a2po.steps, a2po.evaluations, batches
        self._weights = {name: value.detach().clone() for name, value in policy.state_dict().items()}
        target = f"{trainer_class.__module__}:{trainer_class.__name__}"
        methods = ("_estimate_optimal_values", "_prepare_inputs")
        self.acted = [acts(patch_id, f"{target}.{name}", a2po) for name in methods]
        self._ids = {prompt: tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts}
        self._kinds = kinds
        # The optimal values are estimated in batches of the datasets as they are.
        ordered = [trained[start : start + ROWS] for start in range(0, len(trained), ROWS)] + [evaluated]
        self._values = {
            kind: {
                prompt: _value(row)
                for batch in ordered
                for prompt, row in zip(batch, self._rows(batch, kind), strict=True)
            }
            for kind in kinds
        }

    def judged(self) -> Outcome:
        """Judge the norm of the gradients of the first step, and check all losses and gradients."""
        import torch

        def norm(gradients: Mapping[str, Any]) -> float:
            return float(torch.stack([value.norm() for value in gradients.values()]).norm())

        norms = {kind: norm(self._gradients(0, kind)) for kind in self._kinds}
        # Releases of transformers divide by the micro-batches once, twice or not at all.
        ratio = norm(self.steps[0].gradients) / norms["right"]
        factors = {kind: norms["right"] / value for kind, value in norms.items()}
        self._factor = min(
            (MICRO_BATCHES**-power for power in range(3)),
            key=lambda factor: min(abs(math.log(ratio * each / factor)) for each in factors.values()),
        )
        outcome = judge(norm(self.steps[0].gradients) / self._factor, **norms)
        self._check("right" if outcome.verdict is Verdict.FIXED else "wrong")
        return outcome

    def _check(self, kind: str) -> None:
        """Check that all gradients and losses are of this kind."""
        for number, step in enumerate(self.steps):
            expected = {name: self._factor * value for name, value in self._gradients(number, kind).items()}
            largest = max(float(value.abs().max()) for value in expected.values())
            difference = step.difference(expected)
            assert difference < 1e-5 * max(1.0, largest), f"step {number}: gradients are not {kind} by {difference}"
        weights = [step.weights for step in self.steps for _ in step.micro_batches] + [self._weights]
        losses = [part.loss for step in self.steps for part in step.micro_batches]
        losses += [part.loss for part in self.evaluations]
        for batch, loss, weights_then in zip(self._batches, losses, weights, strict=True):
            self._policy.load_state_dict(weights_then)
            difference = abs(loss - float(self._loss(self._policy, batch, kind).detach()))
            assert difference < 1e-5 * max(1.0, loss), f"the loss of {batch} is not {kind} by {difference}"

    def _gradients(self, number: int, kind: str) -> dict[str, Any]:
        """Return the gradients of a step by the formula, of the sum of its micro-batches."""
        batches = self._batches[number * MICRO_BATCHES : (number + 1) * MICRO_BATCHES]

        def loss(model: Any) -> Any:
            return sum(self._loss(model, batch, kind) for batch in batches)

        return expected_gradients(self._policy, self.steps[number].weights, loss)

    def _rows(self, batch: Sequence[str], kind: str) -> list[Row]:
        return self._kinds[kind]([self._ids[prompt] for prompt in batch])

    def _loss(self, model: Any, batch: Sequence[str], kind: str) -> Any:
        import torch

        losses = []
        for prompt, row in zip(batch, self._rows(batch, kind), strict=True):
            completion = _completion(row, 0)
            ratio = self._log_prob(model, row, completion) - self._log_prob(self._reference, row, completion).detach()
            losses.append((BETA * ratio - (_reward(completion) - self._values[kind][prompt])).square())
        return torch.stack(losses).mean()

    def _log_prob(self, model: Any, row: Row, completion: list[int]) -> Any:
        """Return the log-prob of a completion. Its first token is predicted at the end of the row, padding or not."""
        import torch

        ids, mask = row
        inputs = {"input_ids": ids + completion, "attention_mask": mask + [1] * len(completion)}
        tensors = {name: torch.tensor([values]) for name, values in inputs.items()}
        log_probs = model(**tensors, use_cache=False).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        return log_probs.gather(1, torch.tensor(completion)[:, None]).sum()


def unpadded(prompts: list[list[int]]) -> list[Row]:
    """Return the prompts without padding. Padding on the left changes nothing."""
    return [(ids, [1] * len(ids)) for ids in prompts]


def padded_on_the_right(prompts: list[list[int]]) -> list[Row]:
    """Return the prompts with padding up to the longest one."""
    longest = max(map(len, prompts))
    return [(ids + [0] * (longest - len(ids)), [1] * len(ids) + [0] * (longest - len(ids))) for ids in prompts]


def _completion(row: Row, copy: int) -> list[int]:
    """Return a completion of one to four words and an end."""
    ids, mask = row
    number = sum(ids) + 11 * copy + 5 * (not mask[-1])
    return [*(10 + (7 * number + 3 * place) % 50 for place in range(1 + number % 4)), EOS]


def _value(row: Row) -> float:
    """Return the optimal value of a prompt."""
    rewards = [_reward(_completion(row, copy)) for copy in range(SAMPLES)]
    return BETA * math.log(sum(math.exp(reward / BETA) for reward in rewards) / SAMPLES)


def _reward(completion: list[int]) -> float:
    """Return 1 or 0, by all words of a completion. Its end does not count."""
    return float(sum(token for token in completion if token != EOS) % 2)


def _words_of(text: str) -> list[int]:
    return [3 + int(word[1:]) for word in text.split()]


def _generate(input_ids: Any, attention_mask: Any, generation_config: Any, **kwargs: Any) -> Any:
    """Complete each prompt as often as the config says."""
    import torch

    count = generation_config.num_return_sequences or 1
    rows = [
        _completion((ids, mask), copy)
        for ids, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
        for copy in range(count)
    ]
    longest = max(map(len, rows))
    completions = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return torch.cat([input_ids.repeat_interleave(count, 0), completions], dim=1)
