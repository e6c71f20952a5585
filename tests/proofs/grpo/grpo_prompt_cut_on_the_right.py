"""Train two optimizer steps of two micro-batches with the real GRPO and RLOO on long prompts, and evaluate.

Prompts are messages, or texts; some fit. The ids that the model is to complete, and those of the loss, are compared
with the last and with the first ones of their text, and the accumulated gradients with those of the losses on either,
which are computed without TRL. The loss itself is that of the advantages, in every context.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False

ID = "grpo-prompt-cut-on-the-right"
STEPS, MICRO_BATCHES, LIMIT = 2, 2, 6
LENGTHS = (9, 2, 4, 12, 3, 7, 1, 5)
"""The words of each question. The chat template adds three."""
EQUIVALENT = {"applied twice": "the outer view tells the inner one not to cut"}


def train() -> tiny.TrainingResult:
    runs = _runs(LIMIT)
    if not runs:
        return tiny.TrainingResult(absent("in this release max_prompt_length cuts nothing"))
    outcomes = [run.judged() for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on prompts that fit, without a limit, and with a tokenizer that cuts on the left."""
    runs = {f"fit {name}": run for name, run in _runs(max(LENGTHS) + 3).items()}
    runs |= {f"all {name}": run for name, run in _runs(None).items()}
    runs |= {f"left {name}": run for name, run in _runs(LIMIT, truncation_side="left").items()}
    for name, run in runs.items():
        run.judged()
        assert not run.acted, f"the wrapper acts: {name}"
    return tiny.result_of_runs(runs, absent("nothing is cut on the right"))


def _runs(limit: int | None, **settings: Any) -> dict[str, _Run]:
    """Return runs of the trainers that have a limit in this release."""
    methods = [name for name in ("GRPO", "RLOO") if hasattr(tiny.classes(name)[0], "_generate_and_score_completions")]
    messages = [{"prompt": [{"role": "user", "content": question}]} for question in _questions()]
    texts = [{"prompt": question} for question in _questions()]
    rows = {"messages": (messages, "w58 {} <eos> w59 "), "texts": (texts, "{}")}
    runs = {f"{name} {kind}": _Run(name, *rows[kind], limit, **settings) for name in methods for kind in rows}
    return {name: run for name, run in runs.items() if run.has_limit}


def _questions() -> list[str]:
    return [" ".join(f"w{(7 * row + place) % 56}" for place in range(length)) for row, length in enumerate(LENGTHS)]


class _Run:
    """A run of a real trainer, and the ids of its prompts."""

    def __init__(
        self, name: str, rows: list[dict[str, Any]], template: str, limit: int | None, truncation_side: str = "right"
    ) -> None:
        self.name, words = name, tiny.chat_tokenizer()
        uncut = [words(template.format(question))["input_ids"] for question in _questions()]
        self.kept = {"right": [ids[-(limit or 99) :] for ids in uncut], "wrong": [ids[:limit] for ids in uncut]}
        trainer_class, config_class = tiny.classes(name)
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (tiny.llama(folder, seed=0) for _ in range(2))
            trainer = tiny.grpo(
                tiny.stepwise(trainer_class),
                policy,
                config_class,
                reward_funcs=_reward,
                prompts=[row["prompt"] for row in rows],
                gradient_accumulation_steps=MICRO_BATCHES,
                per_device_eval_batch_size=4,
                max_steps=STEPS,
                optim="sgd",
                learning_rate=0.5,
                beta=0.0,
                loss_type="grpo",
                max_prompt_length=limit,
            )
            self.has_limit = hasattr(trainer, "max_prompt_length")
            if not self.has_limit:
                return
            tokenizer = trainer.processing_class
            tokenizer.chat_template, tokenizer.truncation_side = words.chat_template, truncation_side
            self.generated: list[list[int]] = []
            policy.generate = self._recorded(policy.generate)
            trainer.train()
            trainer.evaluate(trainer.train_dataset.select(range(4)))
        assert trainer.processing_class is tokenizer, "the trainer has another tokenizer"
        assert tokenizer.truncation_side == truncation_side, "the user's tokenizer is changed"
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        target = f"{trainer_class.__module__}:{trainer_class.__name__}._generate_single_turn"
        self.acted = tiny.acts(ID, target, trainer)

    def _recorded(self, generate: Any) -> Any:
        def record(input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
            self.generated += _without_padding(input_ids, attention_mask)
            return generate(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

        return record

    def judged(self) -> Outcome:
        """Judge all prompts, also those of the evaluation, and the gradients of each step."""
        batches = [micro_batch.inputs for step in self.steps for micro_batch in step.micro_batches]
        batches += [evaluation.inputs for evaluation in self.evaluations]
        prompts = [ids for batch in batches for ids in _without_padding(batch["prompt_ids"], batch["prompt_mask"])]
        outcomes = [self._judged(prompts), self._judged(self.generated)]
        if outcomes[0].verdict is not outcomes[1].verdict:
            raise AssertionError(f"the model is to complete other prompts than those of the loss: {outcomes}")
        kind = "right" if outcomes[0].verdict is Verdict.FIXED else "wrong"
        for number, step in enumerate(self.steps):
            difference = step.difference(tiny.expected_gradients(self.policy, step.weights, self._loss_of(step, kind)))
            # Some gradients are greater than 10.
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            if difference > 1e-6 * max(1.0, largest) or largest == 0.0:
                raise AssertionError(f"step {number}: the gradients differ from the {kind} ones by {difference}")
        shapes = [len(step.micro_batches) for step in self.steps], len(self.evaluations)
        if shapes != ([MICRO_BATCHES] * STEPS, 4):
            raise AssertionError(f"micro-batches of the steps and the evaluation: {shapes}")
        return outcomes[0]

    def _judged(self, prompts: Sequence[list[int]]) -> Outcome:
        """Judge how many prompts have kept their end: all, or those that fit."""
        counts = {kind: sum(ids in kept for ids in prompts) for kind, kept in self.kept.items()}
        always = sum(all(ids in kept for kept in self.kept.values()) for ids in prompts)
        outcome = judge(counts["right"], right=len(prompts), wrong=always)
        if max(counts.values()) != len(prompts):
            raise AssertionError(f"of {len(prompts)} prompts so many are of a kind: {counts}")
        return outcome

    def _loss_of(self, step: tiny.Step, kind: str) -> Any:
        """Return the loss of all micro-batches, with prompts of this kind."""
        kept = {tuple(ids): self.kept[kind][row] for each in self.kept.values() for row, ids in enumerate(each)}

        def loss(model: Any) -> Any:
            return sum(self._loss(model, micro_batch.inputs, kept) for micro_batch in step.micro_batches)

        return loss

    def _loss(self, model: Any, batch: dict[str, Any], kept: dict[tuple[int, ...], list[int]]) -> Any:
        """Return the loss of a micro-batch, a row at a time and so without padding."""
        import torch

        losses = []
        prompts = _without_padding(batch["prompt_ids"], batch["prompt_mask"])
        completions = _without_padding(batch["completion_ids"], batch["completion_mask"])
        for prompt, completion, advantage in zip(prompts, completions, batch["advantages"], strict=True):
            context = kept[tuple(prompt)]
            log_probs = model(input_ids=torch.tensor([context + completion])).logits[0, len(context) - 1 : -1]
            log_probs = log_probs.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            if self.name == "RLOO":  # The ratio is that of whole completions.
                log_probs = log_probs.sum()
            losses.append(-(advantage * (log_probs - log_probs.detach()).exp()).mean())
        return torch.stack(losses).mean() / MICRO_BATCHES


def _without_padding(ids: Any, mask: Any) -> list[list[int]]:
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


def _reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return rewards that grow with the row. The order of a batch does not depend on the completions."""
    import torch

    # The trainer shuffles the batch after it has the rewards.
    torch.manual_seed(0)
    return [float(row * row % 7) for row in range(len(completions))]
