"""Train two steps of two micro-batches with the real OnlineDPOTrainer on a tiny Gemma 3 and images.

The completions are sampled. Losses and gradients are compared with the formula on them, a sequence at a time and so
without padding, with the types of their tokens and without them. The types are made of the ids, without TRL.
"""

from __future__ import annotations

import inspect
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import vision

OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "the proof makes the model of images without an adapter; a test of the patch has one"}
EQUIVALENT = {
    "applied twice": "the inner call has the types already, and they are the same",
    "carry_the_types: `{**(images or {}), **types} or None` -> `{**(images or {}), **types}`": (
        "images have pixels at least"
    ),
}

ID = "online-dpo-vlm-token-types-missing"
BETA, MICRO_BATCHES, STEPS, IMAGE_ID = 0.5, 2, 2, 63
METHODS = ("_generate", "_forward")
QUESTIONS = [f"w{index}" + " w9" * (index % 3) for index in range(8)]


def train() -> tiny.TrainingResult:
    if not _scores_images():
        return tiny.TrainingResult(
            absent("in this release the processor of Gemma 3 refuses the texts that it is given")
        )
    run = _Run("Gemma 3")
    return run.result(run.judged())


def unaffected() -> tiny.TrainingResult:
    """Train on images of a model without types, and on texts."""
    runs = [_Run(kind) for kind in ("Llava", "no images")]
    for run in runs:
        run.check(types=False)
        assert not run.acted, "the wrappers act where there is no type to pass on"
    return runs[0].result(absent("the model takes no types, or there are no images"), *runs[1:])


def _scores_images() -> bool:
    from trl.experimental.online_dpo import OnlineDPOTrainer

    return "vision_inputs is None" in inspect.getsource(inspect.unwrap(OnlineDPOTrainer._forward))


class _Run:
    """A run of the real trainer, beside the formula."""

    def __init__(self, kind: str) -> None:
        import torch
        from datasets import Dataset

        trainer_class, config_class = tiny.classes("OnlineDPO")
        run, self.kind = self, kind
        self.losses: list[float] = []
        self.gradients: list[dict[str, Any]] = []
        self.by_formula: dict[bool, list[tuple[float, dict[str, Any]]]] = {True: [], False: []}
        self.generated_with: list[bool] = []
        make = vision.llava if kind == "Llava" else vision.gemma3
        policy, self.reference = make(seed=0), make(seed=0)
        generate = policy.generate

        def recorded(**inputs: Any) -> Any:
            run.generated_with.append("token_type_ids" in inputs)
            if inputs.get("token_type_ids") is not None:
                assert inputs["token_type_ids"].equal((inputs["input_ids"] == IMAGE_ID).long())
            return generate(**inputs)

        policy.generate = recorded

        class Recorder(trainer_class):  # type: ignore[misc, valid-type]
            def _generate(self, *args: Any, **kwargs: Any) -> Any:
                self.generated = super()._generate(*args, **kwargs)
                return self.generated

            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                loss = super().training_step(*args, **kwargs)
                run.losses.append(float(loss))
                run.gradients.append(tiny.gradients_of(self.model))
                for types in (True, False):
                    run.compute(self.model, self.generated, types)
                return loss

        settings: dict[str, Any] = {
            "beta": BETA,
            "max_length": 64,
            "max_new_tokens": 5,
            "gradient_accumulation_steps": MICRO_BATCHES,
        }
        settings |= {"max_steps": STEPS, "optim": "sgd", "learning_rate": 0.01}
        # No image is sampled.
        settings |= {"generation_kwargs": {"suppress_tokens": [*range(59, 64)]}}
        rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": text}]} for text in QUESTIONS]
        if kind != "no images":
            rows = [{**row, "image": [0.1 * index, 0.5, -0.3]} for index, row in enumerate(rows)]
        words = vision.processor(token_types="" if kind == "Llava" else "token_type_ids")
        words.tokenizer.padding_side = "left"
        if kind == "no images":
            words.chat_template = "{% for message in messages %}w58 {{ message['content'] }} <eos> w59 {% endfor %}"
        torch.manual_seed(0)
        trainer = tiny.trainer(
            Recorder,
            model=policy,
            reward_funcs=lambda completions, **kwargs: [_reward(each) for each in completions],
            args=tiny.config(config_class, **settings),
            train_dataset=Dataset.from_list(rows),
            tokenizer=words,
        )
        trainer.train()
        methods = [f"trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer.{name}" for name in METHODS]
        self.acted = sum(tiny.acts(ID, method, trainer) or 0 for method in methods)

    def compute(self, model: Any, generated: Any, types: bool) -> None:
        """Add the loss of a micro-batch by the formula, and the gradients that its step has then."""
        import torch

        prompts, prompt_mask, completions, completion_mask, images = generated
        count = len(prompts) // 2
        rows = []
        for row in range(2 * count):
            prompt = prompts[row][prompt_mask[row].bool()]
            completion = completions[row][completion_mask[row].bool()]
            pixels = images["pixel_values"][row : row + 1] if images else None
            rows.append((prompt, completion, pixels))
        texts = vision.processor().tokenizer.batch_decode(completions, skip_special_tokens=True)
        rewards = [_reward([{"content": text}]) for text in texts]
        margins = []
        for row in range(count):
            better, worse = (row, row + count) if rewards[row] >= rewards[row + count] else (row + count, row)
            margins.append(self._log_ratio(model, *rows[better], types) - self._log_ratio(model, *rows[worse], types))
        loss = -torch.nn.functional.logsigmoid(BETA * torch.stack(margins)).mean()
        weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        found = {name: value for name, value in zip(weights, gradients, strict=True) if value is not None}
        micro_batches = self.by_formula[types]
        if len(micro_batches) % MICRO_BATCHES:
            found = {name: value + micro_batches[-1][1][name] for name, value in found.items()}
        micro_batches.append((float(loss.detach()), found))

    def _log_ratio(self, model: Any, prompt: Any, completion: Any, pixels: Any, types: bool) -> Any:
        import torch

        ids = torch.cat([prompt, completion])[None]
        inputs = {"input_ids": ids, **({"pixel_values": pixels} if pixels is not None else {})}
        if types and self.kind == "Gemma 3":
            inputs["token_type_ids"] = (ids == IMAGE_ID).long()

        def log_prob(model: Any) -> Any:
            logits = model(**inputs, use_cache=False).logits[0, len(prompt) - 1 : -1]
            return logits.log_softmax(-1).gather(1, completion[:, None]).sum()

        with torch.no_grad():
            of_reference = log_prob(self.reference)
        return log_prob(model) - of_reference

    def judged(self) -> Outcome:
        """Judge the norm of the gradients of the first step, and check that all is of this kind."""
        measured, right, wrong = (
            sum(float(value.square().sum()) for value in gradients.values()) ** 0.5
            for gradients in (self.gradients[1], *(self.by_formula[types][1][1] for types in (True, False)))
        )
        scale = min(
            (1.0, 1 / MICRO_BATCHES), key=lambda scale: min(abs(measured - scale * each) for each in (right, wrong))
        )
        outcome = judge(measured / scale, right=right, wrong=wrong)
        types = outcome.verdict is Verdict.FIXED
        assert self.generated_with == [types] * (STEPS * MICRO_BATCHES), self.generated_with
        self.check(types=types)
        return outcome

    def check(self, *, types: bool) -> None:
        """Check that all losses and gradients are of this kind."""
        expected = self.by_formula[types]
        assert len(self.gradients) == len(expected) == STEPS * MICRO_BATCHES
        scales = (1.0, 1 / MICRO_BATCHES)
        off = min(
            max(abs(loss - scale * formula) for loss, (formula, _) in zip(self.losses, expected, strict=True))
            for scale in scales
        )
        gradients_off = min(
            max(
                float((gradients[name] - scale * value).abs().max() / max(1.0, float(value.abs().max())))
                for gradients, (_, formula) in zip(self.gradients, expected, strict=True)
                for name, value in formula.items()
            )
            for scale in scales
        )
        assert max(off, gradients_off) < 1e-5, (self.kind, off, gradients_off)

    def result(self, outcome: Outcome, *others: _Run) -> tiny.TrainingResult:
        gradients = {
            f"{run.kind} {number} {name}": value
            for run in (self, *others)
            for number, gradients in enumerate(run.gradients)
            for name, value in gradients.items()
        }
        return tiny.TrainingResult(outcome, sum(sum(run.losses) for run in (self, *others)), gradients)


def _reward(completion: Any) -> float:
    """Return a number that tells the two completions of a prompt apart."""
    return float(sum(place * int(word[1:]) for place, word in enumerate(completion[0]["content"].split(), 1)) % 17)
