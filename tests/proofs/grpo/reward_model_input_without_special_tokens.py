"""Train two optimizer steps of two micro-batches with the real GRPO and RLOO, on a reward model that scores texts.

Its tokenizer puts a token before each text and one behind it, as that of BERT. A copy of the model says which score is
right. The advantages of each micro-batch and of the evaluation are compared with the formulas (arXiv:2402.03300,
section 4.1.2, and arXiv:2402.14740, section 3), and the gradients with those of the losses on them, computed without
TRL.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"compiled": "the first releases call a compiled reward model as a function"}

ID = "reward-model-input-without-special-tokens"
METHODS = ("compute_loss", "_prepare_inputs", "_generate_and_score_completions", "_calculate_rewards")
STEPS, MICRO_BATCHES, GROUP = 2, 2, 4
EQUIVALENT = {"applied twice": "the inner one finds a tokenizer that adds its tokens in any case"}
BEGINNING, END = 61, 62
"""The tokens of the words that the tokenizer of the reward model puts around a text."""


def train() -> tiny.TrainingResult:
    return _result(marks=True)


def unaffected() -> tiny.TrainingResult:
    """Train with a tokenizer that adds no tokens."""
    return _result(marks=False)


def _result(*, marks: bool) -> tiny.TrainingResult:
    names = _trainers()
    if not names:
        return tiny.TrainingResult(absent("no trainer takes reward models in a list"))
    runs = {name: _Run(name, marks) for name in names}
    outcomes = [run.judged() for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    if marks:
        return tiny.result_of_runs(runs, outcomes[0])
    for name, run in runs.items():
        assert outcomes[0].verdict is Verdict.FIXED, outcomes
        assert not run.acted, f"the wrapper acts on a tokenizer that adds no tokens: {name}"
    return tiny.result_of_runs(runs, absent("the tokenizer adds no tokens"))


def _trainers() -> list[str]:
    """Return the trainers that take reward functions. RLOO before 0.22 is another trainer, and 0.13 has no GRPO."""
    import trl

    has_rewards = {"GRPO": hasattr(trl, "GRPOTrainer"), "RLOO": hasattr(trl.RLOOTrainer, "_calculate_rewards")}
    return [name for name, takes_functions in has_rewards.items() if takes_functions]


class _Run:
    """A run of a real trainer with a reward model whose tokenizer adds tokens to a text, or none."""

    def __init__(self, name: str, marks: bool) -> None:
        self.name = name
        self.marks = marks
        self.scored: list[tuple[list[int], float]] = []
        """The tokens of each text that is scored, without padding, and its score."""
        trainer_class, config_class = tiny.classes(name)
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (tiny.llama(folder, seed=0) for _ in range(2))
            reward, self.reward = (_reward_model(folder) for _ in range(2))
            reward.register_forward_hook(self._note, with_kwargs=True)
            trainer = tiny.grpo(
                tiny.stepwise(trainer_class),
                policy,
                config_class,
                reward_funcs=reward,
                gradient_accumulation_steps=MICRO_BATCHES,
                per_device_eval_batch_size=GROUP,
                max_steps=STEPS,
                optim="sgd",
                learning_rate=0.5,
                beta=0.0,
                num_iterations=1,
                loss_type="bnpo",
                shuffle_dataset=False,
            )
            trainer.reward_processing_classes = [_reward_tokenizer(marks)]
            policy.generate = _answering_several_times(policy.generate)
            self.tokenizer = trainer.processing_class
            trainer.train()
            if version("trl") != "0.14.0":  # It cannot evaluate.
                trainer.evaluate(trainer.train_dataset.select(range(GROUP)))
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        self.acted = any(
            tiny.acts(ID, f"{trainer_class.__module__}:{name}Trainer.{method}", trainer) for method in METHODS
        )

    def _note(self, model: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        import torch

        for ids, kept, score in zip(kwargs["input_ids"], kwargs["attention_mask"], outputs.logits[:, 0], strict=True):
            self.scored.append((ids[kept.bool()].tolist(), float(score)))
        # The trainer shuffles the batch after it has the rewards.
        torch.manual_seed(0)

    def judged(self) -> Outcome:
        """Judge the scores of all calls; the advantages and the gradients must be those of these scores."""
        texts = [[token for token in tokens if token not in (BEGINNING, END)] for tokens, _ in self.scored]
        measured, right, wrong = (
            sum(math.cos(number) * score for number, score in enumerate(scores))
            for scores in (
                [score for _, score in self.scored],
                [self._score_of(text, self.marks) for text in texts],
                [self._score_of(text, False) for text in texts],
            )
        )
        if not self.marks:
            assert abs(measured - right) < 1e-4, (measured, right)
            outcome = Outcome(Verdict.FIXED)
        else:
            outcome = judge(measured, right=right, wrong=wrong)
        marked = self.marks and outcome.verdict is Verdict.FIXED
        if version("trl") != "0.14.0":  # It has the advantages within its method.
            self._compare(marked)
        return outcome

    def _compare(self, marked: bool) -> None:
        import torch

        for call in [call for step in self.steps for call in step.micro_batches] + self.evaluations:
            expected = self._advantages(call.inputs, marked)
            assert (expected - self._advantages(call.inputs, not marked)).abs().min() > 0.001
            torch.testing.assert_close(call.inputs["advantages"], expected, rtol=1e-4, atol=1e-5)
        for number, step in enumerate(self.steps):
            assert len(step.micro_batches) == MICRO_BATCHES
            differences = [
                step.difference(tiny.expected_gradients(self.policy, step.weights, self._loss_of(step, marked, factor)))
                for factor in (1 / MICRO_BATCHES, 1.0)
            ]
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            assert largest > 0.0
            assert min(differences) < 1e-5 * max(1.0, largest), (self.name, number, differences, largest)

    def _advantages(self, batch: dict[str, Any], marked: bool) -> Any:
        """Return the advantages of the rows by the formula: of the scores of the whole group of each row."""
        import torch

        advantages = []
        for prompt, completion in zip(*_rows(batch), strict=True):
            group = torch.tensor([self._score(prompt, other, marked) for other in _completions()])
            # Of each completion the first token tells which one it is.
            reward = group[(completion[0] - 10) // 7]
            if self.name == "RLOO":
                advantages.append(reward - (group.sum() - reward) / (GROUP - 1))
            else:
                # These do not scale (TRL pull request 3992).
                scale = 1.0 if version("trl") in ("0.22.0", "0.22.1") else group.std() + 1e-4
                advantages.append((reward - group.mean()) / scale)
        return torch.stack(advantages)

    def _score(self, prompt: list[int], completion: list[int], marked: bool) -> float:
        texts = [self.tokenizer.decode(part, skip_special_tokens=True) for part in (prompt, completion)]
        return self._score_of(tiny.tokenizer()("".join(texts))["input_ids"], marked)

    def _score_of(self, text: list[int], marked: bool) -> float:
        import torch

        ids = torch.tensor([[BEGINNING, *text, END] if marked else text])
        with torch.no_grad():
            return float(self.reward(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, 0])

    def _loss_of(self, step: tiny.Step, marked: bool, factor: float) -> Callable[[Any], Any]:
        def loss(model: Any) -> Any:
            return sum(self._loss(model, call.inputs, marked) for call in step.micro_batches) * factor

        return loss

    def _loss(self, model: Any, batch: dict[str, Any], marked: bool) -> Any:
        """Return the loss of a micro-batch, a row at a time and so without padding."""
        import torch
        from packaging.version import Version

        gains = []
        for prompt, completion, advantage in zip(*_rows(batch), self._advantages(batch, marked), strict=True):
            log_probs = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            log_probs = log_probs.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            if self.name == "RLOO":  # The ratio is that of whole completions.
                log_probs = log_probs.sum()[None]
            gains.append(advantage * (log_probs - log_probs.detach()).exp())
        # ``trl.__version__`` is "unknown" in 0.22.0.
        if Version(version("trl")) < Version("0.16"):  # The mean over sequences.
            return -torch.stack([gain.mean() for gain in gains]).mean()
        return -torch.cat(gains).mean()


def _reward_model(folder: str) -> Any:
    """Return a BERT of one layer."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    path = Path(folder, "reward")
    if not path.exists():
        torch.manual_seed(1)
        config = BertConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            num_labels=1,
            pad_token_id=0,
            initializer_range=0.5,
        )
        BertForSequenceClassification(config).save_pretrained(path)
        tiny.tokenizer().save_pretrained(path)
    return BertForSequenceClassification.from_pretrained(path)


def _reward_tokenizer(marks: bool) -> Any:
    """Return the tokenizer of the tiny words, which puts two of them around a text if ``marks``."""
    from tokenizers import processors

    tokenizer = tiny.tokenizer()
    if marks:
        marked = f"w{BEGINNING - 3} $A w{END - 3}"
        tokens = [(f"w{token - 3}", token) for token in (BEGINNING, END)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=marked, special_tokens=tokens)
    return tokenizer


def _completions() -> list[list[int]]:
    """Return the tokens of the completions of each group, as ``tiny.grpo`` generates them."""
    return [
        [*(10 + (7 * row + 3 * place) % 50 for place in range(length - 1)), 1]
        for row, length in enumerate(tiny.COMPLETION_LENGTHS)
    ]


def _answering_several_times(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``generate`` for 0.14.0 too, which leaves it to the model to answer a prompt several times."""

    def generate_several(input_ids: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        times = getattr(generation_config, "num_return_sequences", None) or 1
        return generate(input_ids.repeat_interleave(times, 0))

    return generate_several


def _rows(batch: dict[str, Any]) -> list[list[list[int]]]:
    """Return the prompts and the completions of a batch without their padding."""
    return [
        [row[kept.bool()].tolist() for row, kept in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)]
        for part in ("prompt", "completion")
    ]
