"""Train two optimizer steps of two micro-batches with the real GRPO and RLOO on prefilled prompts, and evaluate.

Some prompts end with an assistant message, of one word or of three, and others with the user's. The ids of every prompt
are compared with those of its text, and the accumulated gradients with those of the losses on the right context or on
TRL's, which are computed without TRL. The loss itself is that of the advantages, in every context.
"""

from __future__ import annotations

import inspect
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False

ID = "grpo-prefilled-assistant-turn-closed"
STEPS, MICRO_BATCHES = 2, 2
USERS = [f"w{number}" + " w20 w21" * (number % 2) for number in range(8)]
PREFILLS = ["w30", "w31 w32 w33", "", "w34 w35"]
"""The last message of every fourth prompt is the user's."""
EQUIVALENT = {"applied twice": "the inner view leaves the same turn open"}


def train() -> tiny.TrainingResult:
    if not _renders_by_itself(tiny.classes("GRPO")[0]):
        return tiny.TrainingResult(absent("the prompts are rendered by trl.data_utils.apply_chat_template"))
    runs = {name: _Run(name, _prompts(PREFILLS)) for name in ("GRPO", "RLOO")}
    outcomes = [run.judged() for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on conversations that end with the user, and on prompts that are no conversations."""
    runs = {
        "GRPO": _Run("GRPO", _prompts([""])),
        "RLOO": _Run("RLOO", _prompts([""])),
        "texts": _Run("GRPO", [(user, user, user) for user in USERS]),
    }
    for run in runs.values():
        run.judged()
        assert not run.acted, "the wrapper acts on prompts that are not prefilled"
    return tiny.result_of_runs(runs, absent("no prompt is prefilled"))


def _prompts(prefills: list[str]) -> list[tuple[Any, str, str]]:
    """Return conversations, with the text that they should have and the one that they have in TRL."""
    rows: list[tuple[Any, str, str]] = []
    for number, user in enumerate(USERS):
        prefill = prefills[number % len(prefills)]
        messages = [{"role": "user", "content": user}]
        text = f"w58 {user} <eos> w59 "
        if prefill:
            messages.append({"role": "assistant", "content": prefill})
        rows.append((messages, text + prefill, f"{text}{prefill} <eos> w59 " if prefill else text))
    return rows


def _renders_by_itself(trainer_class: Any) -> bool:
    names = [name for name in ("_tokenize_prompts", "_generate_single_turn") if hasattr(trainer_class, name)]
    return bool(names) and len(inspect.signature(getattr(trainer_class, names[0])).parameters) == 2


class _Run:
    """A run of a real trainer, and the texts of its prompts."""

    def __init__(self, name: str, rows: list[tuple[Any, str, str]]) -> None:
        self.name, self.rows = name, rows
        self.tokenizer = tiny.chat_tokenizer()
        trainer_class, config_class = tiny.classes(name)
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (tiny.llama(folder, seed=0) for _ in range(2))
            trainer = tiny.grpo(
                tiny.stepwise(trainer_class),
                policy,
                config_class,
                reward_funcs=_reward,
                prompts=[prompt for prompt, _, _ in rows],
                gradient_accumulation_steps=MICRO_BATCHES,
                per_device_eval_batch_size=4,
                max_steps=STEPS,
                optim="sgd",
                learning_rate=0.5,
                beta=0.0,
                loss_type="grpo",
                max_prompt_length=None,
            )
            trainer.processing_class.chat_template = self.tokenizer.chat_template
            trainer.train()
            trainer.evaluate(trainer.train_dataset.select(range(4)))
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        method = next(part for part in ("_tokenize_prompts", "_generate_single_turn") if hasattr(trainer, part))
        self.acted = tiny.acts(ID, f"{trainer_class.__module__}:{trainer_class.__name__}.{method}", trainer)

    def judged(self) -> Outcome:
        """Judge all prompts, also those of the evaluation, and the gradients of each step."""
        ids = {kind: self._ids(column) for kind, column in (("right", 1), ("wrong", 2))}
        batches = [micro_batch.inputs for step in self.steps for micro_batch in step.micro_batches]
        batches += [evaluation.inputs for evaluation in self.evaluations]
        prompts = [_without_padding(batch["prompt_ids"], batch["prompt_mask"]) for batch in batches]
        counts = {kind: sum(prompt in ids[kind] for batch in prompts for prompt in batch) for kind in ids}
        total = sum(map(len, prompts))
        always = sum(prompt in ids["right"] and prompt in ids["wrong"] for batch in prompts for prompt in batch)
        outcome = judge(counts["right"], right=total, wrong=always, prompts=total)
        if max(counts.values()) != total:
            raise AssertionError(f"of {total} prompts so many are of a kind: {counts}")
        kind = 1 if outcome.verdict is Verdict.FIXED else 2
        for number, step in enumerate(self.steps):
            difference = step.difference(tiny.expected_gradients(self.policy, step.weights, self._loss_of(step, kind)))
            # Some gradients are greater than 10.
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            if difference > 1e-6 * max(1.0, largest) or largest == 0.0:
                raise AssertionError(f"step {number}: the gradients differ from those of {kind} by {difference}")
        shapes = [len(step.micro_batches) for step in self.steps], len(self.evaluations)
        if shapes != ([MICRO_BATCHES] * STEPS, 4):
            raise AssertionError(f"micro-batches of the steps and the evaluation: {shapes}")
        return outcome

    def _ids(self, column: int) -> list[list[int]]:
        return [self.tokenizer(row[column])["input_ids"] for row in self.rows]

    def _loss_of(self, step: tiny.Step, column: int) -> Any:
        """Return the loss of all micro-batches, with prompts whose ids are those of their text of this kind."""
        texts = {
            tuple(ids): self.tokenizer(row[column])["input_ids"]
            for row in self.rows
            for ids in (self.tokenizer(row[1])["input_ids"], self.tokenizer(row[2])["input_ids"])
        }

        def loss(model: Any) -> Any:
            return sum(self._loss(model, micro_batch.inputs, texts) for micro_batch in step.micro_batches)

        return loss

    def _loss(self, model: Any, batch: dict[str, Any], texts: dict[tuple[int, ...], list[int]]) -> Any:
        """Return the loss of a micro-batch, a row at a time and so without padding."""
        import torch

        losses = []
        prompts = _without_padding(batch["prompt_ids"], batch["prompt_mask"])
        completions = _without_padding(batch["completion_ids"], batch["completion_mask"])
        for prompt, completion, advantage in zip(prompts, completions, batch["advantages"], strict=True):
            context = texts[tuple(prompt)]
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
