"""Train two steps of two micro-batches with each real trainer on texts that begin with a BOS, and evaluate.

Each run is compared with two others, whose tokenizer adds nothing: on the same texts, and on texts that begin twice.
Prompts, losses and gradients of GRPO and RLOO are also compared with those of the formula, a row at a time.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Sequence
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False

ID = "grpo-double-bos-pretemplated-prompt"
BOS, STEPS, MICRO_BATCHES = 62, 2, 2
ADDS, SILENT = "w59 $A", "$A"
TEXTS = [" ".join(f"w{(5 * row + 3 * place) % 50}" for place in range(1 + row % 4)) for row in range(8)]
ONCE, TWICE = ([begun + text for text in TEXTS] for begun in ("w59 ", "w59 w59 "))
METHODS = ("_tokenize_prompts_untruncated", "_tokenize_prompts", "_generate_single_turn")
NAMES = ("GRPO", "RLOO", "SDPO", "SDFT", "Distillation")


def train() -> tiny.TrainingResult:
    runs = {name: _Run(name, ONCE) for name in NAMES if _adds_special_tokens(name)}
    outcomes = [run.judged() for run in runs.values()]
    if not outcomes:
        return tiny.TrainingResult(absent("the prompts are tokenized without special tokens"))
    if len({outcome.verdict for outcome in outcomes}) > 1:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    if outcomes[0].verdict is Verdict.FIXED:
        # Beside texts with a BOS, the others get theirs as before.
        mixed = _Run("GRPO", [text.removeprefix("w59 ") if row % 2 else text for row, text in enumerate(ONCE)])
        mixed.compare(_Run("GRPO", ONCE, SILENT))
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on texts without a BOS, on messages, and with a tokenizer that adds none."""
    runs = {}
    for name in filter(_adds_special_tokens, NAMES):
        messages = [[{"role": "user", "content": text}] for text in TEXTS]
        cases = {"texts": (TEXTS, ADDS), "messages": (messages, ADDS), "silent": (TWICE, SILENT)}
        for case, (prompts, single) in cases.items():
            runs[f"{name} {case}"] = run = _Run(name, prompts, single)
            assert not run.acted, f"the wrapper acts: {name} {case}"
    return tiny.result_of_runs(runs, absent("the prompts begin once, or are messages, or no BOS is added"))


def _classes(name: str) -> tuple[Any, Any]:
    import trl

    # Distillation has left its old name behind.
    if name == "Distillation" and hasattr(trl, "DistillationTrainer"):
        return trl.DistillationTrainer, trl.DistillationConfig
    classes: tuple[Any, Any] = tiny.classes(name)
    return classes


def _method(trainer_class: Any) -> str:
    return next((method for method in METHODS if trainer_class and method in vars(trainer_class)), "")


def _adds_special_tokens(name: str) -> bool:
    trainer_class, _ = _classes(name)
    method = _method(trainer_class)
    # RLOO of 0.26 adds none, as GRPO up to 0.25.
    return bool(method) and "add_special_tokens" not in str(
        inspect.unwrap(vars(trainer_class)[method]).__code__.co_consts
    )


def _words(single: str) -> Any:
    """Return a tokenizer that makes ``single`` of a text."""
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    words.padding_side, words.bos_token = "left", "w59"
    words.chat_template = "w59 {% for message in messages %}{{ message['content'] }} {% endfor %}"
    words.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[("w59", BOS)])
    return words


class _Run:
    """A run of a real trainer."""

    def __init__(self, name: str, prompts: Sequence[Any], single: str = ADDS) -> None:
        from datasets import Dataset

        self.name, self.generated_from = name, []
        trainer_class, config_class = _classes(name)
        settings: dict[str, Any] = {"gradient_accumulation_steps": MICRO_BATCHES, "max_steps": STEPS, "optim": "sgd"}
        settings |= {"learning_rate": 0.5, "beta": 0.0, "loss_type": "grpo", "max_completion_length": 8}
        settings |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_generations": 4}
        settings |= {"max_prompt_length": None}
        rows = [{"prompt": prompt} for prompt in prompts]
        given: dict[str, Any] = {"reward_funcs": _reward}
        if name in ("SDPO", "SDFT", "Distillation"):
            settings |= {"distillation_mode": "full_logits", "distillation_topk": None, "loss_type": "dapo"}
            settings |= {"num_generations": 4 if name == "SDPO" else 1, "use_successful_as_teacher": True}
            settings |= {"success_reward_threshold": 3.0}
        if name == "SDFT":
            rows = [{**row, "privileged_context": "w51 w52"} for row in rows]
            given = {}
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (tiny.llama(folder, seed=0) for _ in range(2))
            policy.generate = self._generate
            words = _words(single)
            if name == "Distillation":
                given = {"teacher_model": tiny.llama(folder, seed=1)}
                # It compares the tokenizer with the teacher's.
                words.save_pretrained(folder)
                given["teacher_model"].config._name_or_path = folder
            trainer = tiny.trainer(
                tiny.stepwise(trainer_class),
                model=policy,
                args=tiny.config(config_class, **settings),
                train_dataset=Dataset.from_list(rows),
                eval_dataset=Dataset.from_list(rows[:4]),
                tokenizer=words,
                **given,
            )
            trainer.train()
            trainer.evaluate()
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        target = f"{trainer_class.__module__}:{trainer_class.__name__}.{_method(trainer_class)}"
        self.acted = tiny.acts(ID, target, trainer)

    def _generate(self, input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
        """Complete each prompt by one to four words and an end, by its row and not by its ids."""
        import torch

        self.generated_from += _without_padding(input_ids, attention_mask)
        rows = [
            [*(10 + (7 * row + 3 * place) % 50 for place in range(1 + row % 4)), 1] for row in range(len(input_ids))
        ]
        longest = max(map(len, rows))
        return torch.cat([input_ids, torch.tensor([row + [0] * (longest - len(row)) for row in rows])], dim=1)

    def judged(self) -> Outcome:
        """Judge the tokens of the prompts that are generated from, and compare all else with a run of this kind."""
        others = {"right": _Run(self.name, ONCE, SILENT), "wrong": _Run(self.name, TWICE, SILENT)}
        counts = {kind: sum(map(len, run.generated_from)) for kind, run in others.items()}
        outcome = judge(sum(map(len, self.generated_from)), **counts)
        kind = "right" if outcome.verdict is Verdict.FIXED else "wrong"
        self.compare(others[kind])
        if self.name in ("GRPO", "RLOO"):
            self._compare_with_formula()
        return outcome

    def compare(self, other: _Run) -> None:
        """Compare prompts, losses and gradients with those of another run."""
        import torch

        assert self.generated_from == other.generated_from
        assert [len(step.micro_batches) for step in self.steps] == [MICRO_BATCHES] * STEPS
        assert len(self.evaluations) == len(other.evaluations) > 0
        for step, expected in zip(self.steps, other.steps, strict=True):
            difference = step.difference(expected.gradients)
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            if difference > 1e-5 * max(1.0, largest) or largest == 0.0:
                raise AssertionError(f"{self.name}: the gradients differ by {difference} of {largest}")
        for part, expected in zip(self._micro_batches(), other._micro_batches(), strict=True):
            torch.testing.assert_close(part.loss, expected.loss)

    def _micro_batches(self) -> list[tiny.MicroBatch]:
        return [part for step in self.steps for part in step.micro_batches] + self.evaluations

    def _compare_with_formula(self) -> None:
        """Compare the gradients with those of the formula, for the prompts that were generated from."""
        prompts = [
            row
            for part in self._micro_batches()
            for row in _without_padding(part.inputs["prompt_ids"], part.inputs["prompt_mask"])
        ]
        assert all(prompt in self.generated_from for prompt in prompts), "the loss has other prompts"
        for step in self.steps:
            expected = tiny.expected_gradients(self.policy, step.weights, self._loss_of(step))
            largest = max(float(value.abs().max()) for value in expected.values())
            assert step.difference(expected) < 1e-5 * max(1.0, largest)

    def _loss_of(self, step: tiny.Step) -> Any:
        return lambda model: sum(self._loss(model, micro_batch.inputs) for micro_batch in step.micro_batches)

    def _loss(self, model: Any, batch: dict[str, Any]) -> Any:
        """Return the loss of a micro-batch, a row at a time and so without padding."""
        import torch

        losses = []
        prompts = _without_padding(batch["prompt_ids"], batch["prompt_mask"])
        completions = _without_padding(batch["completion_ids"], batch["completion_mask"])
        for prompt, completion, advantage in zip(prompts, completions, batch["advantages"], strict=True):
            log_probs = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            log_probs = log_probs.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            if self.name == "RLOO":  # The ratio is that of whole completions.
                log_probs = log_probs.sum()
            losses.append(-(advantage * (log_probs - log_probs.detach()).exp()).mean())
        return torch.stack(losses).mean() / MICRO_BATCHES


def _without_padding(ids: Any, mask: Any) -> list[list[int]]:
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


def _reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return rewards by the row. The order of a batch does not depend on the completions."""
    import torch

    # The trainer shuffles the batch after it has the rewards.
    torch.manual_seed(0)
    return [float(row * row % 7) for row in range(len(completions))]
