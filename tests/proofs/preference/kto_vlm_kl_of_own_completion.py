"""Train two steps with the real KTOTrainer on five images in batches of two, and evaluate them one at a time.

The second step has a batch of one row. Losses and gradients are compared with equations 7 and 8 of KTO's paper
(arXiv:2402.01306) on sequences that are written by hand, with the completion of the row before and with the own one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from trl_hotfix import witness
from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import vision

OVERLAYS = ()
PARITY = False
VARIANTS = "the completions are chosen by the collator, outside of the model and whatever part of it is trained"

ID = "kto-vlm-kl-of-own-completion"
BETA, BATCH, ROWS = 0.5, 2, 5

IMAGES = [[[0.1 * index, 0.5, -0.3]] for index in range(ROWS)]
QUESTIONS = [f"w{index}" + " w9" * (index % 3) for index in range(ROWS)]
COMPLETIONS = [f"w{20 + index}" + " w30" * (index % 2) for index in range(ROWS)]
LABELS = [True, False, True, True, False]


def train() -> tiny.TrainingResult:
    if not hasattr(sys.modules[_classes()[0].__module__], "DataCollatorForVisionUnpairedPreference"):
        return tiny.TrainingResult(absent("KTO of this release takes no images"))
    runs = {
        f"{kind}, {when}": _Run(kind=kind, first=when)
        for kind in ("messages", "texts")
        for when in ("train", "evaluate")
    }
    outcomes = [run.judged() for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"the runs do not agree: {outcomes}")
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train and evaluate in batches of several rows, with a loss that has no KL term, and without images."""
    before = witness.PROCESS.total(ID, "").acted
    runs = {
        "several rows": _Run(rows=4, per_device_eval_batch_size=2),
        "no KL": _Run(loss_type="apo_zero_unpaired"),
        "no images": _Run(images=False),
    }
    assert witness.PROCESS.total(ID, "").acted == before, "the wrapper acts where no row is alone with a KL term"
    assert runs["several rows"].judged(several=True).verdict is Verdict.FIXED
    return tiny.result_of_runs(runs, absent("no row of a batch with images is alone, or the loss has no KL term"))


class _Run:
    """A run of the real trainer, which trains or evaluates first."""

    def __init__(
        self, *, kind: str = "messages", first: str = "train", images: bool = True, rows: int = ROWS, **settings: Any
    ) -> None:
        import torch
        from datasets import Dataset

        trainer_class, config_class = _classes()
        self.kind = kind
        self.policy, self.reference = vision.llava(seed=0), vision.llava(seed=1)
        data = Dataset.from_list([self._row(index, images) for index in range(rows)])
        torch.manual_seed(0)
        defaults: dict[str, Any] = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": 1}
        trainer = tiny.trainer(
            tiny.stepwise(trainer_class),
            model=vision.llava(seed=0),
            ref_model=vision.llava(seed=1),
            args=tiny.config(
                config_class,
                gradient_accumulation_steps=2,
                max_steps=2,
                optim="sgd",
                learning_rate=0.5,
                beta=BETA,
                max_length=None,
                **{**defaults, **settings},
            ),
            train_dataset=data,
            eval_dataset=data,
            tokenizer=vision.processor() if images else vision.processor().tokenizer,
        )
        self.evaluations, self._evaluated_at = [], []
        for what in ("train", "evaluate", "evaluate") if first == "train" else ("evaluate", "train", "evaluate"):
            trainer.evaluations = []
            getattr(trainer, what)()
            self.evaluations += trainer.evaluations
            weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
            self._evaluated_at += [weights] * len(trainer.evaluations)
        self.steps = trainer.steps

    def _row(self, index: int, images: bool) -> dict[str, Any]:
        question, completion = QUESTIONS[index], COMPLETIONS[index]
        row: dict[str, Any] = {"label": LABELS[index], **({"images": IMAGES[index]} if images else {})}
        if self.kind == "texts" or not images:
            image = "<image> " if images else ""
            return {**row, "prompt": f"{image}{question} <eos>", "completion": f" {completion} <eos>"}
        named = {"prompt": ("user", question), "completion": ("assistant", completion)}
        return {**row, **{name: [{"role": role, "content": text}] for name, (role, text) in named.items()}}

    def judged(self, *, several: bool = False) -> Outcome:
        """Judge the sum of all losses; each loss and each gradient must be that of one kind of completions."""
        import torch

        batches = [[0, 1], [2, 3]] if several else [[index] for index in range(ROWS)]
        of_training = [[[0, 1], [2, 3]], [[0, 1], [2, 3]] if several else [[4]]]
        calls = []
        for step, indices in zip(self.steps, of_training, strict=True):
            calls += [(step.weights, *pair) for pair in zip(step.micro_batches, indices, strict=True)]
        calls += list(zip(self._evaluated_at, self.evaluations, batches * 2, strict=True))
        losses: dict[bool, list[float]] = {}
        with torch.no_grad():
            for own in (False, True):
                losses[own] = [float(self._loss(weights, indices, own)) for weights, _, indices in calls]
        measured = [call.loss for _, call, _ in calls]
        sums = [
            sum(weight * loss for weight, loss in enumerate(kind, 1))
            for kind in (measured, losses[False], losses[True])
        ]
        outcome = judge(sums[0], right=sums[1], wrong=sums[2] if not several else -1.0)
        own = outcome.verdict is Verdict.REPRODUCED
        for one, other in zip(measured, losses[own], strict=True):
            assert abs(one - other) < 1e-5, (measured, losses)
        for number, (step, indices) in enumerate(zip(self.steps, of_training, strict=True)):
            differences = [
                step.difference(tiny.expected_gradients(self.policy, step.weights, self._of_step(indices, own, factor)))
                # The mean, the sum, and the mean that transformers 5.2 divides by the micro-batches again.
                for factor in (0.5, 1.0, 0.25)
            ]
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            assert min(differences) < 1e-5 * max(1.0, largest), (number, differences, largest)
            assert largest > 0.0
        return outcome

    def _of_step(self, micro_batches: list[list[int]], own: bool, factor: float) -> Callable[[Any], Any]:
        def loss(model: Any) -> Any:
            return sum(self._loss(None, indices, own) for indices in micro_batches) * factor

        return loss

    def _loss(self, weights: Any, indices: list[int], own: bool) -> Any:
        """Return the loss of the rows of a micro-batch, a sequence at a time and so without padding."""
        import torch

        if weights is not None:
            self.policy.load_state_dict(weights)
        others = [indices[-1], *indices[:-1]]
        if len(indices) == 1 and not own:
            others = [(indices[0] - 1) % ROWS]
        pairs = zip(indices, others, strict=True)
        with torch.no_grad():
            kl = torch.stack([self._ratio(*pair) for pair in pairs]).mean().clamp(min=0)
        ratios = torch.stack([self._ratio(index, index) for index in indices])
        signs = torch.tensor([1.0 if LABELS[index] else -1.0 for index in indices])
        return (1 - torch.sigmoid(BETA * signs * (ratios - kl))).mean()

    def _ratio(self, index: int, other: int) -> Any:
        """Return the log-ratio of a completion to the prompt of row ``index``: of the policy to the reference."""
        import torch

        image = "<image> " if self.kind == "texts" else "w58 <image> "
        end = "" if self.kind == "texts" else " w59"
        prompt, completion = f"{image}{QUESTIONS[index]} <eos>{end}", f"{COMPLETIONS[other]} <eos>"
        vocabulary = vision.processor().tokenizer.get_vocab()
        before, after = (
            [vocabulary[word] for word in text.replace("<image>", vision.EXPANDED).split()]
            for text in (prompt, completion)
        )
        pixels = torch.tensor(IMAGES[index])[:, :, None, None].expand(-1, 3, 4, 4).contiguous()

        def log_prob(model: Any) -> Any:
            logits = model(input_ids=torch.tensor([before + after]), pixel_values=pixels).logits[0]
            return logits[len(before) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(after)[:, None]).sum()

        with torch.no_grad():
            of_reference = log_prob(self.reference)
        return log_prob(self.policy) - of_reference


def _classes() -> tuple[Any, Any]:
    """Return the trainer and its config. Up to 1.7.1 they are experimental."""
    from trl import KTOConfig, KTOTrainer
    from trl.trainer import kto_trainer

    if hasattr(kto_trainer, "DataCollatorForVisionUnpairedPreference"):
        return KTOTrainer, KTOConfig
    return tiny.classes("KTO")
