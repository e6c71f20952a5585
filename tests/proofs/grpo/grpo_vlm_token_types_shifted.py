"""Train two steps of two micro-batches with the real GRPO and RLOO on a tiny Gemma 3 and images, and evaluate.

The tokenizer adds a beginning, and the chat template writes one too. The gradients are compared with those of the
formula on the ids of the micro-batch, a sequence at a time and so without padding. The types are made of the ids, and
one token late.
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
VARIANTS = {"lora": "the proof makes the model of images without an adapter, and the types are made before the model"}

ID = "grpo-vlm-token-types-shifted"
STEPS, MICRO_BATCHES, IMAGE_ID = 2, 2, 63
QUESTIONS = [f"w{index}" + " w9" * (index % 3) for index in range(8)]


def train() -> tiny.TrainingResult:
    from trl.trainer import grpo_trainer

    if "token_type_ids" not in inspect.getsource(grpo_trainer):
        return tiny.TrainingResult(absent("this release passes no types on"))
    runs = {name: _Run(name) for name in ("GRPO", "RLOO")}
    outcomes = [run.judged() for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on texts, and on images of a model without types."""
    runs = {f"{name}, {kind}": _Run(name, kind) for name in ("GRPO", "RLOO") for kind in ("texts", "Llava")}
    for name, run in runs.items():
        assert not run.acted, f"the wrapper acts: {name}"
    return tiny.result_of_runs(runs, absent("no type of a token is passed on"))


class _Run:
    """A run of the real trainer."""

    def __init__(self, name: str, kind: str = "Gemma 3") -> None:
        import torch
        import trl
        from datasets import Dataset

        self.name, self.kind = name, kind
        make = vision.llava if kind == "Llava" else vision.gemma3
        policy, self.model = make(seed=0), make(seed=0)

        def generate(input_ids: Any, **kwargs: Any) -> Any:
            rows = [
                [*(10 + (7 * row + 3 * place) % 40 for place in range(1 + row % 3)), 1] for row in range(len(input_ids))
            ]
            longest = max(map(len, rows))
            completions = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
            return torch.cat([input_ids, completions], dim=1)

        policy.generate = generate
        contents = [[{"type": "text", "text": text}] if kind == "texts" else text for text in QUESTIONS]
        rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": content}]} for content in contents]
        if kind != "texts":
            rows = [{**row, "image": [0.1 * index, 0.5, -0.3]} for index, row in enumerate(rows)]
        settings = {"gradient_accumulation_steps": MICRO_BATCHES, "max_steps": STEPS, "optim": "sgd", "beta": 0.0}
        settings |= {"learning_rate": 0.01, "num_generations": 2, "max_completion_length": 8}
        settings |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
        settings |= {"loss_type": "grpo"} if name == "GRPO" else {}
        data = Dataset.from_list(rows)
        torch.manual_seed(0)
        trainer = tiny.trainer(
            tiny.stepwise(getattr(trl, f"{name}Trainer")),
            model=policy,
            reward_funcs=lambda completions, **kwargs: [float(row % 5) for row in range(len(completions))],
            args=tiny.config(getattr(trl, f"{name}Config"), **settings),
            train_dataset=data,
            eval_dataset=data.select(range(2)),
            tokenizer=_processor(kind),
        )
        trainer.train()
        trainer.evaluate()
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        target = f"trl.trainer.{name.lower()}_trainer:{name}Trainer._generate_and_score_completions"
        self.acted = tiny.acts(ID, target, trainer)

    def judged(self) -> Outcome:
        """Judge the norm of the gradients of the first step; all gradients and types must be of one kind."""
        norms = [
            sum(float(value.square().sum()) for value in gradients.values()) ** 0.5
            for gradients in (self.steps[0].gradients, *(self._expected(self.steps[0], late) for late in (0, 1)))
        ]
        outcome = judge(norms[0], right=norms[1], wrong=norms[2])
        late = int(outcome.verdict is Verdict.REPRODUCED)
        for step in self.steps:
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            assert step.difference(self._expected(step, late)) < 1e-5 * max(1.0, largest)
        calls = [*(call for step in self.steps for call in step.micro_batches), *self.evaluations]
        assert len(calls) > STEPS * MICRO_BATCHES
        for call in calls:
            prompts = call.inputs["prompt_ids"]
            types = call.inputs["token_type_ids"][:, : prompts.shape[1]]
            assert types[:, late:].equal((prompts == IMAGE_ID).long()[:, : prompts.shape[1] - late])
        return outcome

    def _expected(self, step: tiny.Step, late: int) -> dict[str, Any]:
        def loss(model: Any) -> Any:
            return sum(self._loss(model, call.inputs, late) for call in step.micro_batches) / MICRO_BATCHES

        found: dict[str, Any] = tiny.expected_gradients(self.model, step.weights, loss)
        return found

    def _loss(self, model: Any, batch: dict[str, Any], late: int) -> Any:
        """Return the mean over sequences: GRPO has the mean of the tokens of each, RLOO their sum."""
        import torch

        losses = []
        for row, advantage in enumerate(batch["advantages"]):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
            completion = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
            ids = torch.cat([prompt, completion])[None]
            types = (ids == IMAGE_ID).long()
            types = torch.cat([types[:, :0].new_zeros(1, late), types], dim=1)[:, : ids.shape[1]]
            pixels = batch["pixel_values"][row : row + 1]
            logits = model(input_ids=ids, pixel_values=pixels, token_type_ids=types, use_cache=False).logits
            log_probs = logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, completion[:, None])[:, 0]
            losses.append(-advantage * (log_probs.mean() if self.name == "GRPO" else log_probs.sum()))
        return torch.stack(losses).mean()


def _processor(kind: str) -> Any:
    """Return a processor that adds w57 to a text, which its template writes too, and pads on the left."""
    from tokenizers.processors import TemplateProcessing

    words = vision.processor("w57 " + vision.TEMPLATE, token_types="" if kind == "Llava" else "token_type_ids")
    words.tokenizer.padding_side, words.tokenizer.bos_token = "left", "w57"
    beginning = ("w57", words.tokenizer.convert_tokens_to_ids("w57"))
    words.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="w57 $A", special_tokens=[beginning])
    return words
