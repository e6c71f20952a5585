"""Train two steps of two micro-batches with the real trainers of GRPO and RLOO on plain texts, and evaluate.

What is generated depends on the row alone. Losses and gradients are those of a run whose texts begin with a BOS, with a
tokenizer that adds nothing, or of a run whose texts have none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False
EQUIVALENT = {"applied twice": "the view of a view asks for the same BOS"}

ID = "grpo-plain-prompt-without-bos"
BOS, STEPS, MICRO_BATCHES = 62, 2, 2
ADDS, SILENT, ADDS_END = "w59 $A", "$A", "w59 $A <eos>"
TEXTS = [" ".join(f"w{(5 * row + 3 * place) % 50}" for place in range(1 + row % 4)) for row in range(8)]
BEGUN = ["w59 " + text for text in TEXTS]
NAMES = ("GRPO", "RLOO")


def train() -> tiny.TrainingResult:
    runs = {name: _Run(name, TEXTS) for name in NAMES if _tokenizes_here(name)}
    if not runs:
        return tiny.TrainingResult(absent("no trainer tokenizes prompts where it generates"))
    outcomes = [run.judged() for run in runs.values()]
    # RLOO of 0.26 adds none, and GRPO of 0.26 does.
    outcome = next((outcome for outcome in outcomes if outcome.verdict is Verdict.REPRODUCED), outcomes[0])
    if trl_hotfix.status()[ID].state.value == "applied":
        # Beside texts without a BOS, those that have it keep it.
        mixed = [text if row % 2 else "w59 " + text for row, text in enumerate(TEXTS)]
        last = list(runs)[-1]
        _Run(last, mixed).compare(_Run(last, BEGUN, SILENT))
    return tiny.result_of_runs(runs, outcome)


def unaffected() -> tiny.TrainingResult:
    """Train on texts with a BOS, on messages, and with tokenizers that add no BOS, or an end as well."""
    messages = [[{"role": "user", "content": text}] for text in TEXTS]
    cases = {"messages": (messages, ADDS), "silent": (TEXTS, SILENT), "an end": (TEXTS, ADDS_END)}
    runs = {}
    for name in filter(_tokenizes_here, NAMES):
        for case, (prompts, single) in cases.items():
            runs[f"{name} {case}"] = _Run(name, prompts, single)
    return tiny.result_of_runs(runs, absent("the prompts have a BOS, or the tokenizer adds more or less"))


def _tokenizes_here(name: str) -> bool:
    """Return whether the trainer tokenizes prompts where it generates."""
    trainer_class, _ = tiny.classes(name)
    elsewhere = "_tokenize_prompts", "generate_completions"
    return trainer_class is not None and not any(hasattr(trainer_class, method) for method in elsewhere)


class _Run:
    """A run of a real trainer."""

    def __init__(self, name: str, prompts: Sequence[Any], single: str = ADDS) -> None:
        from datasets import Dataset

        self.name, self.generated_from = name, list[list[int]]()
        trainer_class, config_class = tiny.classes(name)
        settings: dict[str, Any] = {"gradient_accumulation_steps": MICRO_BATCHES, "max_steps": STEPS, "optim": "sgd"}
        settings |= {"learning_rate": 0.5, "beta": 0.0, "loss_type": "grpo", "max_completion_length": 8}
        settings |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_generations": 4}
        settings |= {"max_prompt_length": 16}
        rows = [{"prompt": prompt} for prompt in prompts]
        with tempfile.TemporaryDirectory() as folder:
            policy = tiny.llama(folder, seed=0)
            policy.generate = self._generate
            trainer = tiny.trainer(
                tiny.stepwise(trainer_class),
                model=policy,
                args=tiny.config(config_class, **settings),
                train_dataset=Dataset.from_list(rows),
                eval_dataset=Dataset.from_list(rows[:4]),
                tokenizer=_words(single),
                reward_funcs=_reward,
            )
            trainer.train()
            # GRPO of 0.14 fails in evaluations.
            self.evaluates = "prediction_step" in vars(trainer_class)
            if self.evaluates:
                trainer.evaluate()
        self.steps, self.evaluations = trainer.steps, trainer.evaluations

    def _generate(self, input_ids: Any, attention_mask: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        """Complete each prompt by one to four words and an end, by its row and not by its ids."""
        import torch

        pairs = zip(input_ids, attention_mask, strict=True)
        self.generated_from += [ids[mask.bool()].tolist() for ids, mask in pairs]
        # 0.14 asks for all completions of a prompt at once.
        prompts = input_ids.repeat_interleave(getattr(generation_config, "num_return_sequences", None) or 1, 0)
        rows = [[*(10 + (7 * row + 3 * place) % 50 for place in range(1 + row % 4)), 1] for row in range(len(prompts))]
        longest = max(map(len, rows))
        return torch.cat([prompts, torch.tensor([row + [0] * (longest - len(row)) for row in rows])], dim=1)

    def judged(self) -> Outcome:
        """Judge the tokens of the prompts that are generated from, and compare all else with a run of this kind."""
        others = {"right": _Run(self.name, BEGUN, SILENT), "wrong": _Run(self.name, TEXTS, SILENT)}
        counts = {kind: sum(map(len, run.generated_from)) for kind, run in others.items()}
        outcome = judge(sum(map(len, self.generated_from)), **counts)
        self.compare(others["right" if outcome.verdict is Verdict.FIXED else "wrong"])
        return outcome

    def compare(self, other: _Run) -> None:
        """Compare prompts, losses and gradients with those of another run."""
        import torch

        assert self.generated_from == other.generated_from
        assert [len(step.micro_batches) for step in self.steps] == [MICRO_BATCHES] * STEPS
        assert len(self.evaluations) == len(other.evaluations)
        assert bool(self.evaluations) is self.evaluates
        for step, expected in zip(self.steps, other.steps, strict=True):
            difference = step.difference(expected.gradients)
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            if difference > 1e-5 * max(1.0, largest) or largest == 0.0:
                raise AssertionError(f"{self.name}: the gradients differ by {difference} of {largest}")
        for part, expected in zip(self._micro_batches(), other._micro_batches(), strict=True):
            torch.testing.assert_close(part.loss, expected.loss)

    def _micro_batches(self) -> list[tiny.MicroBatch]:
        return [part for step in self.steps for part in step.micro_batches] + self.evaluations


def _words(single: str) -> Any:
    """Return a tokenizer that makes ``single`` of a text."""
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    words.padding_side, words.bos_token = "left", "w59"
    words.chat_template = "w59 {% for message in messages %}{{ message['content'] }} {% endfor %}"
    specials = [("w59", BOS), ("<eos>", 1)]
    words.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    return words


def _reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return rewards by the row. The order of a batch does not depend on the completions."""
    import torch

    # The trainer shuffles the batch after it has the rewards.
    torch.manual_seed(0)
    return [float(row * row % 7) for row in range(len(completions))]
