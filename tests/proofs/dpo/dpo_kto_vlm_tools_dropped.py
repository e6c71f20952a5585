"""Train two optimizer steps of two micro-batches with the real DPO and KTO on images and tools, and evaluate.

Rows have none to three tools, and other lengths; two have no image. Losses and gradients are compared with equation 7
of DPO's paper (arXiv:2305.18290), and with that of the unpaired loss of APO (arXiv:2408.06266), on sequences that are
written by hand, with the tools and without them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from trl_hotfix import witness
from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import vision

OVERLAYS = ()
PARITY = False
VARIANTS = "the tokens are made by the collator, outside of the model and whatever part of it is trained"

ID = "dpo-kto-vlm-tools-dropped"
BETA, MICRO_BATCHES, STEPS = 0.5, 2, 2
EQUIVALENT = {"applied twice": "the second is given the tools already"}

NAMES = [[f"w{40 + number}" for number in range(index % 4)] for index in range(8)]
IMAGES = [[[0.1 * index, 0.5, -0.3]] if index % 4 else [] for index in range(8)]
QUESTIONS = [f"w{index}" + " w9" * (index % 3) for index in range(8)]
CHOSEN = [f"w{20 + index}" + " w30" * (index % 2) for index in range(8)]
REJECTED = [f"w{10 + index}" + " w31 w32" * (index % 3 == 1) for index in range(8)]


def train() -> tiny.TrainingResult:
    names = _trainers()
    if not names:
        return tiny.TrainingResult(absent("no collator of images renders conversations"))
    runs = {f"{name}, {kind}": _Run(name, kind) for name in names for kind in ("structs", "JSON")}
    outcomes = [run.judged() for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"the runs do not agree: {outcomes}")
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on conversations without the column, with empty tools, and on plain texts beside tools."""
    before = witness.PROCESS.total(ID, "").acted
    kinds = ("no column", "empty", "plain texts")
    runs = {f"{name}, {kind}": _Run(name, kind) for name in _trainers() for kind in kinds}
    for name, run in runs.items():
        assert run.judged(plain="plain" in name).verdict is Verdict.REPRODUCED, name
    assert witness.PROCESS.total(ID, "").acted == before, "the wrapper acts where there is no tool to render"
    return tiny.result_of_runs(runs, absent("no tool is to be rendered"))


def _trainers() -> list[str]:
    from trl.trainer import dpo_trainer, kto_trainer

    known = {"DPO": hasattr(dpo_trainer, "DataCollatorForVisionPreference")}
    known["KTO"] = hasattr(kto_trainer, "DataCollatorForVisionUnpairedPreference")
    return [name for name, has_collator in known.items() if has_collator]


def _rows(name: str, kind: str) -> list[dict[str, Any]]:
    def message(role: str, text: str) -> Any:
        if kind != "plain texts":
            return [{"role": role, "content": text}]
        return f"<image> {text} <eos>" if role == "user" and images else f" {text} <eos>"

    made = []
    for index, images in enumerate(IMAGES):
        row = {"images": images, "prompt": message("user", QUESTIONS[index])}
        chosen, rejected = message("assistant", CHOSEN[index]), message("assistant", REJECTED[index])
        if name == "DPO":
            row |= {"chosen": chosen, "rejected": rejected}
        else:
            row |= {"completion": rejected if index % 3 == 1 else chosen, "label": index % 3 != 1}
        tools = [{"type": "function", "function": {"name": each}} for each in NAMES[index]]
        columns = {"structs": tools, "JSON": json.dumps(tools), "empty": [], "plain texts": tools}
        made.append({**row, **({"tools": columns[kind]} if kind in columns else {})})
    return made


class _Run:
    """A run of a real trainer on rows of this kind."""

    def __init__(self, name: str, kind: str) -> None:
        import torch
        import trl
        from datasets import Dataset

        self.name = name
        self.policy, self.reference = vision.llava(seed=0), vision.llava(seed=1)
        rows = Dataset.from_list(_rows(name, kind))
        torch.manual_seed(0)
        trainer = tiny.trainer(
            tiny.stepwise(getattr(trl, f"{name}Trainer")),
            model=vision.llava(seed=0),
            ref_model=vision.llava(seed=1),
            args=tiny.config(
                getattr(trl, f"{name}Config"),
                gradient_accumulation_steps=MICRO_BATCHES,
                max_steps=STEPS,
                optim="sgd",
                learning_rate=0.5,
                beta=BETA,
                max_length=None,
                **({"loss_type": "apo_zero_unpaired"} if name == "KTO" else {}),
            ),
            train_dataset=rows,
            eval_dataset=rows.select(range(3)),
            tokenizer=vision.processor(),
        )
        trainer.train()
        trainer.evaluate()
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        self.trained = {name: value.clone() for name, value in trainer.model.state_dict().items()}

    def judged(self, *, plain: bool = False) -> Outcome:
        """Judge the losses of all steps; each loss and each gradient must be that of one kind of sequences."""
        import torch

        calls = [(step.weights, call) for step in self.steps for call in step.micro_batches]
        calls += [(self.trained, call) for call in self.evaluations]
        losses = {}
        with torch.no_grad():
            for tools in (True, False):
                losses[tools] = [float(self._loss(weights, call.inputs, tools, plain)) for weights, call in calls]
        measured = [call.loss for _, call in calls]
        sums = [
            sum(weight * loss for weight, loss in enumerate(kind, 1))
            for kind in (measured, losses[True], losses[False])
        ]
        outcome = judge(sums[0], right=sums[1], wrong=sums[2])
        shown = outcome.verdict is Verdict.FIXED
        for one, other in zip(measured, losses[shown], strict=True):
            assert abs(one - other) < 1e-5, (self.name, measured, losses)
        for number, step in enumerate(self.steps):
            differences = [
                step.difference(
                    tiny.expected_gradients(self.policy, step.weights, self._of_step(step, shown, plain, factor))
                )
                for factor in (1 / MICRO_BATCHES, 1.0)
            ]
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            assert min(differences) < 1e-5 * max(1.0, largest), (self.name, number, differences, largest)
            assert largest > 0.0
        shapes = [len(step.micro_batches) for step in self.steps], len(self.evaluations)
        assert shapes == ([MICRO_BATCHES] * STEPS, 2), shapes
        return outcome

    def _of_step(self, step: tiny.Step, tools: bool, plain: bool, factor: float) -> Callable[[Any], Any]:
        def loss(model: Any) -> Any:
            return sum(self._loss(None, call.inputs, tools, plain) for call in step.micro_batches) * factor

        return loss

    def _loss(self, weights: Any, batch: dict[str, Any], tools: bool, plain: bool) -> Any:
        """Return the loss of a micro-batch by the formula, a sequence at a time and so without padding."""
        import torch

        if weights is not None:
            self.policy.load_state_dict(weights)
        indices = _indices(batch["input_ids"].tolist())
        if self.name == "DPO":
            indices = indices[: len(indices) // 2]
            ratios = [[self._ratio(index, text, tools, plain) for text in (CHOSEN, REJECTED)] for index in indices]
            margins = torch.stack([chosen - rejected for chosen, rejected in ratios])
            return -torch.nn.functional.logsigmoid(BETA * margins).mean()
        losses = []
        for index in indices:
            bad = index % 3 == 1
            gain = torch.sigmoid(BETA * self._ratio(index, REJECTED if bad else CHOSEN, tools, plain))
            losses.append(gain if bad else 1 - gain)
        return torch.stack(losses).mean()

    def _ratio(self, index: int, completions: list[str], tools: bool, plain: bool) -> Any:
        """Return the log-ratio of a completion: of the policy to the reference."""
        import torch

        shown = "".join(f"w57 {name} " for name in NAMES[index]) if tools else ""
        image = "<image> " if IMAGES[index] else ""
        prompt = f"{shown}w58 {image}{QUESTIONS[index]} <eos> w59 "
        if plain:
            # So that no sequence is right: it has no place for tools.
            prompt = f"{'w57 ' if tools else ''}{image}{QUESTIONS[index]} <eos>"
        before, after = (_tokens(text) for text in (prompt, f"{completions[index]} <eos>"))
        inputs = {"input_ids": torch.tensor([before + after])}
        if IMAGES[index]:
            inputs["pixel_values"] = torch.tensor(IMAGES[index])[:, :, None, None].expand(-1, 3, 4, 4).contiguous()

        def log_prob(model: Any) -> Any:
            logits = model(**inputs).logits[0, len(before) - 1 : -1]
            return logits.log_softmax(-1).gather(1, torch.tensor(after)[:, None]).sum()

        with torch.no_grad():
            of_reference = log_prob(self.reference)
        return log_prob(self.policy) - of_reference


def _tokens(text: str) -> list[int]:
    vocabulary = vision.processor().tokenizer.get_vocab()
    return [vocabulary[word] for word in text.replace("<image>", vision.EXPANDED).split()]


def _indices(sequences: list[list[int]]) -> list[int]:
    """Return the row of each sequence, by the word of its question that no other row has."""
    keys = _tokens(" ".join(f"w{index}" for index in range(8)))
    return [keys.index(next(token for token in sequence if token in keys)) for sequence in sequences]
