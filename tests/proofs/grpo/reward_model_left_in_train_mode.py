"""Train two optimizer steps of two micro-batches with the real GRPO and RLOO, on a reward model in train mode.

Before its head the model has a dropout of 1, so in train mode all of its scores are the bias of the head, and all
advantages are 0. A copy in evaluation mode says which score is right. The advantages of each micro-batch and of the
evaluation are compared with the formulas (arXiv:2402.03300, section 4.1.2, and arXiv:2402.14740, section 3), and the
gradients with those of the losses on them, computed without TRL.
"""

from __future__ import annotations

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

ID = "reward-model-left-in-train-mode"
METHODS = ("compute_loss", "_prepare_inputs", "_generate_and_score_completions", "_calculate_rewards")
STEPS, MICRO_BATCHES, GROUP = 2, 2, 4
EQUIVALENT = {"applied twice": "the second finds a reward model in evaluation mode"}


def train() -> tiny.TrainingResult:
    return _result(in_train_mode=True)


def unaffected() -> tiny.TrainingResult:
    """Train with the same reward model in evaluation mode."""
    return _result(in_train_mode=False)


def _result(*, in_train_mode: bool) -> tiny.TrainingResult:
    names = _trainers()
    if not names:
        return tiny.TrainingResult(absent("no trainer takes reward models in a list"))
    runs = {name: _Run(name, in_train_mode) for name in names}
    outcomes = [run.judged() for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    if in_train_mode:
        return tiny.result_of_runs(runs, outcomes[0])
    for name, run in runs.items():
        assert outcomes[0].verdict is Verdict.FIXED, outcomes
        assert not run.acted, f"the wrapper acts on a reward model in evaluation mode: {name}"
    return tiny.result_of_runs(runs, absent("the reward model is in evaluation mode"))


def _trainers() -> list[str]:
    """Return the trainers that take reward functions. RLOO before 0.22 is another trainer, and 0.13 has no GRPO."""
    import trl

    has_rewards = {"GRPO": hasattr(trl, "GRPOTrainer"), "RLOO": hasattr(trl.RLOOTrainer, "_calculate_rewards")}
    return [name for name, takes_functions in has_rewards.items() if takes_functions]


class _Run:
    """A run of a real trainer with a reward model in this mode."""

    def __init__(self, name: str, in_train_mode: bool) -> None:
        self.name = name
        self.scored: list[tuple[dict[str, Any], Any]] = []
        trainer_class, config_class = tiny.classes(name)
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (tiny.llama(folder, seed=0) for _ in range(2))
            reward, self.reward = (_reward_model(folder) for _ in range(2))
            reward.train(in_train_mode)
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
            policy.generate = _answering_several_times(policy.generate)
            self.tokenizer = trainer.processing_class
            trainer.train()
            if version("trl") != "0.14.0":  # It cannot evaluate.
                trainer.evaluate(trainer.train_dataset.select(range(GROUP)))
            modes = {module.training for module in reward.modules()}
            assert modes == {in_train_mode}, modes
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        self.acted = any(
            tiny.acts(ID, f"{trainer_class.__module__}:{name}Trainer.{method}", trainer) for method in METHODS
        )

    def _note(self, model: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        import torch

        self.scored.append((kwargs, outputs.logits[:, 0]))
        # The trainer shuffles the batch after it has the rewards.
        torch.manual_seed(0)

    def judged(self) -> Outcome:
        """Judge the scores of all calls; the advantages and the gradients must be those of these scores."""
        import torch

        with torch.no_grad():
            pairs = [(scores, self.reward(**inputs).logits[:, 0]) for inputs, scores in self.scored]
        measured, right = (torch.cat([pair[side] for pair in pairs]).clone() for side in (0, 1))
        weights = torch.cos(torch.arange(float(len(right))))
        bias = float(self.reward.classifier.bias)
        numbers = [float((weights * scores).sum()) for scores in (measured, right)]
        outcome = judge(numbers[0], right=numbers[1], wrong=float(weights.sum()) * bias)
        has_dropout = outcome.verdict is not Verdict.FIXED
        if version("trl") != "0.14.0":  # It has the advantages within its method.
            self._compare(has_dropout)
        return outcome

    def _compare(self, has_dropout: bool) -> None:
        import torch

        for call in [call for step in self.steps for call in step.micro_batches] + self.evaluations:
            expected = self._advantages(call.inputs, has_dropout)
            assert has_dropout or expected.abs().min() > 0.01, expected
            torch.testing.assert_close(call.inputs["advantages"], expected, rtol=1e-4, atol=1e-5)
        for number, step in enumerate(self.steps):
            assert len(step.micro_batches) == MICRO_BATCHES
            differences = [
                step.difference(
                    tiny.expected_gradients(self.policy, step.weights, self._loss_of(step, has_dropout, factor))
                )
                for factor in (1 / MICRO_BATCHES, 1.0)
            ]
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            assert min(differences) < 1e-5 * max(1.0, largest), (self.name, number, differences, largest)
            assert has_dropout or largest > 0.0

    def _advantages(self, batch: dict[str, Any], has_dropout: bool) -> Any:
        """Return the advantages of the rows by the formula: of the scores of the whole group of each row."""
        import torch

        if has_dropout:
            return torch.zeros(len(batch["prompt_ids"]))
        advantages = []
        for prompt, completion in zip(*_rows(batch), strict=True):
            group = torch.stack([self._score(prompt, other) for other in _completions()])
            # Of each completion the first token tells which one it is.
            reward = group[(completion[0] - 10) // 7]
            if self.name == "RLOO":
                advantages.append(reward - (group.sum() - reward) / (GROUP - 1))
            else:
                # These do not scale (TRL pull request 3992).
                scale = 1.0 if version("trl") in ("0.22.0", "0.22.1") else group.std() + 1e-4
                advantages.append((reward - group.mean()) / scale)
        return torch.stack(advantages)

    def _score(self, prompt: list[int], completion: list[int]) -> Any:
        import torch

        texts = [self.tokenizer.decode(part, skip_special_tokens=True) for part in (prompt, completion)]
        with torch.no_grad():
            return self.reward(**self.tokenizer("".join(texts), return_tensors="pt")).logits[0, 0]

    def _loss_of(self, step: tiny.Step, has_dropout: bool, factor: float) -> Callable[[Any], Any]:
        def loss(model: Any) -> Any:
            return sum(self._loss(model, call.inputs, has_dropout) for call in step.micro_batches) * factor

        return loss

    def _loss(self, model: Any, batch: dict[str, Any], has_dropout: bool) -> Any:
        """Return the loss of a micro-batch, a row at a time and so without padding."""
        import torch
        from packaging.version import Version

        gains = []
        for prompt, completion, advantage in zip(*_rows(batch), self._advantages(batch, has_dropout), strict=True):
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
    """Return a BERT of one layer, in evaluation mode, with a dropout of 1 before its head and no other."""
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
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout=1.0,
        )
        model = BertForSequenceClassification(config)
        torch.nn.init.constant_(model.classifier.bias, 0.25)
        model.save_pretrained(path)
        tiny.tokenizer().save_pretrained(path)
    return BertForSequenceClassification.from_pretrained(path)


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
