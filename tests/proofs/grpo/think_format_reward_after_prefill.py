"""Train two optimizer steps of two micro-batches with the real GRPO and RLOO on ``think_format_reward``, and evaluate.

The chat template opens ``<think>`` for three of four prompts. The completions of a group have other lengths: two close
the tag that the prompt has opened, one opens and closes a tag itself, and one does neither. The advantages of each
micro-batch and of the evaluation are compared with the formulas (arXiv:2402.03300, section 4.1.2, and
arXiv:2402.14740, section 3) on the rewards of prompt and completion together, and the gradients with those of the
losses on them, computed without TRL.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False

ID = "think-format-reward-after-prefill"
METHODS = ("_generate_and_score_completions", "_calculate_rewards")
STEPS, MICRO_BATCHES, GROUP = 2, 2, 4
OPEN, CLOSE = 50, 51
COMPLETIONS = ([10, CLOSE, 11, 1], [12, 1], [OPEN, 13, 14, CLOSE, 15, 1], [16, 17, 18, CLOSE, 1])
WRONG, RIGHT = (0.0, 0.0, 1.0, 0.0), (1.0, 0.0, 1.0, 1.0)
"""The rewards of the completions where the prompt opens the tag. They are the wrong ones where it does not."""
WORDS = [f"w{number}" + " w20 w21" * (number % 2) for number in range(8)]
EQUIVALENT = {"applied twice": "the second finds another function in the place of TRL's"}


def train() -> tiny.TrainingResult:
    if not _trainers():
        return tiny.TrainingResult(absent("this release has no think_format_reward"))
    runs = {name: _Run(name, opened=range(8)[1:4]) for name in _trainers()}
    outcomes = [run.judged() for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train with a template that opens no tag, and with another reward function."""
    runs = {name: _Run(name, opened=()) for name in _trainers()}
    runs |= {f"{name} with another function": _Run(name, opened=range(8), function=_by_row) for name in _trainers()}
    for name, run in runs.items():
        run.judged()
        assert not run.acted, f"the wrapper acts: {name}"
    return tiny.result_of_runs(runs, absent("no prompt opens the tag, or another function judges"))


def _trainers() -> list[str]:
    """Return the trainers that take reward functions. RLOO before 0.22 is another trainer."""
    import trl

    try:
        import trl.rewards
    except ImportError:
        return []
    return ["GRPO", "RLOO"] if hasattr(trl.RLOOTrainer, "_calculate_rewards") else ["GRPO"]


def _by_row(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    return [WRONG[row % GROUP] for row in range(len(completions))]


class _Run:
    """A run of a real trainer whose template opens the tag for the prompts of these numbers."""

    def __init__(self, name: str, opened: Sequence[int], function: Any = None) -> None:
        self.name = name
        # Another function sees no tag.
        self.opened = [] if function else [WORDS[number] for number in opened]
        trainer_class, config_class = tiny.classes(name)
        self.tokenizer = _tokenizer([WORDS[number] for number in opened])
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (tiny.llama(folder, seed=0) for _ in range(2))
            trainer = tiny.grpo(
                tiny.stepwise(trainer_class),
                policy,
                config_class,
                reward_funcs=function or _of_trl(),
                prompts=[[{"role": "user", "content": words}] for words in WORDS],
                gradient_accumulation_steps=MICRO_BATCHES,
                per_device_eval_batch_size=GROUP,
                max_steps=STEPS,
                optim="sgd",
                learning_rate=0.5,
                beta=0.0,
                num_iterations=1,
                loss_type="bnpo",
                shuffle_dataset=False,
                max_prompt_length=None,
            )
            policy.generate = _generate
            for attribute in ("processing_class", "_tokenizer"):
                if hasattr(trainer, attribute):
                    setattr(trainer, attribute, self.tokenizer)
            trainer.train()
            trainer.evaluate(trainer.train_dataset.select(range(GROUP)))
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        self.acted = any(
            tiny.acts(ID, f"{trainer_class.__module__}:{name}Trainer.{method}", trainer) for method in METHODS
        )

    def judged(self) -> Outcome:
        """Judge the advantages of all micro-batches together, and the gradients of each step."""
        import torch

        batches = [call.inputs for step in self.steps for call in step.micro_batches]
        batches += [call.inputs for call in self.evaluations]
        measured = torch.cat([batch["advantages"] for batch in batches])
        kinds = [torch.cat([self._advantages(batch, rewards) for batch in batches]) for rewards in (RIGHT, WRONG)]
        if not any(torch.allclose(measured, kind, rtol=1e-4, atol=1e-5) for kind in kinds):
            raise AssertionError(f"{self.name}: the advantages {measured} are none of {kinds}")
        weights = torch.cos(torch.arange(float(len(measured))))
        numbers = [float((weights * kind).sum()) for kind in (measured, *kinds)]
        outcome = judge(numbers[0], right=numbers[1], wrong=numbers[2])
        rewards = RIGHT if outcome.verdict is Verdict.FIXED else WRONG
        for number, step in enumerate(self.steps):
            expected = [
                tiny.expected_gradients(self.policy, step.weights, self._loss_of(step, rewards, factor))
                for factor in self._factors()
            ]
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            if min(map(step.difference, expected)) > 1e-5 * max(1.0, largest) or largest == 0.0:
                raise AssertionError(f"{self.name}, step {number}: the gradients, of {largest}, are not these")
        shapes = [len(step.micro_batches) for step in self.steps], len(self.evaluations)
        if shapes != ([MICRO_BATCHES] * STEPS, GROUP):
            raise AssertionError(f"micro-batches of the steps and the evaluation: {shapes}")
        return outcome

    def _factors(self) -> list[float]:
        """Return by what the sum over the micro-batches may be multiplied."""
        from packaging.version import Version

        # ``trl.__version__`` is "unknown" in 0.22.0.
        old = Version(version("trl")) < Version("0.22")
        return [1 / MICRO_BATCHES, 1.0] if old else [1 / MICRO_BATCHES]

    def _advantages(self, batch: dict[str, Any], rewards_after_tag: Sequence[float]) -> Any:
        """Return the advantages of the rows by the formula."""
        import torch

        advantages = []
        for prompt, completion in zip(*_rows(batch), strict=True):
            words = self.tokenizer.decode(prompt)
            opened = any(f" {each} <eos>" in words for each in self.opened)
            group = torch.tensor(rewards_after_tag if opened else WRONG)
            reward = group[COMPLETIONS.index(completion)]
            if self.name == "RLOO":
                advantages.append(reward - (group.sum() - reward) / (GROUP - 1))
            else:
                # These do not scale (TRL pull request 3992).
                scale = 1.0 if version("trl") in ("0.22.0", "0.22.1") else group.std() + 1e-4
                advantages.append((reward - group.mean()) / scale)
        return torch.stack(advantages)

    def _loss_of(self, step: tiny.Step, rewards: Sequence[float], factor: float) -> Callable[[Any], Any]:
        def loss(model: Any) -> Any:
            return sum(self._loss(model, call.inputs, rewards) for call in step.micro_batches) * factor

        return loss

    def _loss(self, model: Any, batch: dict[str, Any], rewards: Sequence[float]) -> Any:
        """Return the loss of a micro-batch, a row at a time and so without padding."""
        import torch

        gains = []
        for prompt, completion, advantage in zip(*_rows(batch), self._advantages(batch, rewards), strict=True):
            log_probs = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            log_probs = log_probs.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            if self.name == "RLOO":  # The ratio is that of whole completions.
                log_probs = log_probs.sum()[None]
            gains.append(advantage * (log_probs - log_probs.detach()).exp())
        return -torch.cat(gains).mean()


def _of_trl() -> Any:
    from trl.rewards import think_format_reward

    return think_format_reward


def _generate(input_ids: Any, **kwargs: Any) -> Any:
    import torch

    longest = max(map(len, COMPLETIONS))
    rows = [COMPLETIONS[row % GROUP] for row in range(len(input_ids))]
    return torch.cat([input_ids, torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in rows])], dim=1)


def _tokenizer(opened: Sequence[str]) -> Any:
    """Return a tokenizer with both tags, whose chat template opens the first one after these prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(60))]
    words[OPEN], words[CLOSE] = "<think>", "</think>"
    word_level = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_level,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",
    )
    tokenizer.chat_template = (
        "{% for message in messages %}w58 {{ message['content'] }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}w59 "
        f"{{% if messages[-1]['content'] in {list(opened)} %}}<think>\n{{% endif %}}{{% endif %}}"
    )
    return tokenizer


def _rows(batch: dict[str, Any]) -> list[list[list[int]]]:
    """Return the prompts and the completions of a batch without their padding."""
    return [
        [row[kept.bool()].tolist() for row, kept in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)]
        for part in ("prompt", "completion")
    ]
