"""The proof: two steps of two micro-batches of the real trainers of online DPO and A2PO, on prompts of several lengths.

What is generated depends on every token of the prompt, as that of a model does, and so do the rewards and A2PO's
optimal values. Losses and gradients are compared with those of the formula, a sequence at a time and so without
padding, on prompts that begin with a BOS and on prompts that do not. The ids are made without TRL.
"""

from __future__ import annotations

import inspect
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny

OVERLAYS = ()
PARITY = False
EQUIVALENT = {"applied twice": "the view of a view asks for the same BOS"}

BOS, EOS, BETA, SAMPLES, MICRO_BATCHES = 62, 1, 0.5, 3, 2
BEGINNINGS: dict[str, list[int]] = {"right": [BOS], "wrong": []}
TEMPLATE = "w59 {% for message in messages %}{{ message['content'] }} {% endfor %}"
PROMPTS = tuple(" ".join(f"w{(5 * row + 3 * place) % 56}" for place in range(1 + row % 5)) for row in range(10))


def train() -> tiny.TrainingResult:
    runs = {name: _Run(name, PROMPTS) for name in ("OnlineDPO", "A2PO") if _tokenizes_without_bos(name)}
    if not runs:
        return tiny.TrainingResult(absent("in this release tokenize_row puts a BOS before each prompt"))
    outcomes = [run.judged() for run in runs.values()]
    if len({outcome.verdict for outcome in outcomes}) > 1:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    if outcomes[0].verdict is Verdict.FIXED:
        # Beside prompts without a BOS, those that have it keep it.
        _Run("OnlineDPO", [f"w59 {text}" if row % 2 else text for row, text in enumerate(PROMPTS)]).check("right")
    return _result(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on texts with a BOS, on messages, and with tokenizers that do not add a BOS, or an end as well."""
    cases = {
        "texts with a BOS": ("right", [f"w59 {prompt}" for prompt in PROMPTS], "w59 $A"),
        "messages": ("right", [[{"role": "user", "content": prompt}] for prompt in PROMPTS], "w59 $A"),
        "a tokenizer that adds nothing": ("wrong", PROMPTS, "$A"),
        "a tokenizer that adds an end": ("wrong", PROMPTS, "w59 $A <eos>"),
    }
    runs = {}
    for name in filter(_tokenizes_without_bos, ("OnlineDPO", "A2PO")):
        for case, (kind, prompts, single) in cases.items():
            runs[f"{name}, {case}"] = run = _Run(name, prompts, single)
            run.check(kind)
    return _result(runs, absent("the prompts have a BOS, or the tokenizer adds more or less"))


def _tokenizes_without_bos(name: str) -> bool:
    trainer_class, _ = tiny.classes(name)
    if name == "A2PO":
        return trainer_class is not None
    return "images" in inspect.signature(getattr(trainer_class, "_generate", id)).parameters


def _result(runs: dict[str, _Run], outcome: Any) -> tiny.TrainingResult:
    gradients = {
        f"{name} {number} {key}": value
        for name, run in runs.items()
        for number, gradients in enumerate(run.gradients)
        for key, value in gradients.items()
    }
    return tiny.TrainingResult(outcome, sum(sum(run.losses) for run in runs.values()), gradients)


class _Run:
    """Two steps of two micro-batches of a real trainer, and A2PO's evaluation, beside the formula."""

    def __init__(self, name: str, prompts: Sequence[Any], single: str = "w59 $A") -> None:
        import torch
        from datasets import Dataset

        run, self.name = self, name
        self.losses: list[float] = []
        self.gradients: list[dict[str, Any]] = []
        self.by_formula: dict[str, list[tuple[float, dict[str, Any]]]] = {kind: [] for kind in BEGINNINGS}
        trainer_class, config_class = tiny.classes(name)

        class Recorder(trainer_class):  # type: ignore[misc, valid-type]
            def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                texts = inputs["prompt"] if name == "OnlineDPO" else [row["prompt"] for row in inputs]
                run.compute(self.model, texts)
                loss = super().training_step(model, inputs, *args, **kwargs)
                run.losses.append(float(loss))
                run.gradients.append({key: weight.grad.clone() for key, weight in _trainable(self.model).items()})
                return loss

        settings = {"beta": BETA, "max_length": 64, "num_value_samples": SAMPLES, "filter_all_incorrect": False}
        settings |= {"beta1": BETA, "beta2": BETA, "gradient_accumulation_steps": MICRO_BATCHES, "max_steps": 2}
        settings |= {"optim": "sgd", "learning_rate": 0.5, "per_device_eval_batch_size": 3}
        rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
        with tempfile.TemporaryDirectory() as folder:
            policy, self.reference = (tiny.llama(folder, seed=0) for _ in range(2))
            policy.generate = _generate
            trainer = tiny.trainer(
                Recorder,
                model=policy,
                reward_funcs=lambda completions, **kwargs: [_reward(_words_of(each)) for each in completions],
                args=tiny.config(config_class, **settings),
                train_dataset=rows,
                **({"eval_dataset": rows.select(range(3))} if name == "A2PO" else {}),
                tokenizer=_tokenizer(single),
            )
            trainer.train()
            if name == "A2PO":
                self.losses.append(trainer.evaluate()["eval_loss"])
                with torch.no_grad():
                    self.evaluated = {kind: float(self.loss(policy, prompts[:3], kind)) for kind in BEGINNINGS}

    def compute(self, model: Any, prompts: Sequence[Any]) -> None:
        """Add the loss of a micro-batch by the formula, and the gradients that its step has then."""
        import torch

        trainable = _trainable(model)
        for kind, micro_batches in self.by_formula.items():
            loss = self.loss(model, prompts, kind)
            gradients = dict(zip(trainable, torch.autograd.grad(loss, list(trainable.values())), strict=True))
            if len(micro_batches) % MICRO_BATCHES:
                gradients = {key: value + micro_batches[-1][1][key] for key, value in gradients.items()}
            micro_batches.append((float(loss.detach()), gradients))

    def loss(self, model: Any, prompts: Sequence[Any], kind: str) -> Any:
        import torch

        loss_of = self._online_dpo if self.name == "OnlineDPO" else self._a2po
        return torch.stack([loss_of(model, _ids(prompt, BEGINNINGS[kind])) for prompt in prompts]).mean()

    def _online_dpo(self, model: Any, prompt: list[int]) -> Any:
        import torch

        one, other = (_completion(prompt, copy) for copy in range(2))
        better, worse = (one, other) if _reward(one) >= _reward(other) else (other, one)
        margin = self._log_ratio(model, prompt, better) - self._log_ratio(model, prompt, worse)
        return -torch.nn.functional.logsigmoid(BETA * margin)

    def _a2po(self, model: Any, prompt: list[int]) -> Any:
        rewards = [_reward(_completion(prompt, copy)) for copy in range(SAMPLES)]
        value = BETA * math.log(sum(math.exp(reward / BETA) for reward in rewards) / SAMPLES)
        ratio = self._log_ratio(model, prompt, _completion(prompt, 0))
        return (BETA * ratio - (rewards[0] - value)).square()

    def _log_ratio(self, model: Any, prompt: list[int], completion: list[int]) -> Any:
        """Return the log-prob of a completion by the model minus that by the reference."""
        import torch

        ids = torch.tensor([prompt + completion])
        policy, reference = (
            each(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            for each in (model, self.reference)
        )
        return (policy - reference.detach()).gather(1, ids[0, len(prompt) :, None]).sum()

    def judged(self) -> Any:
        """Judge the norm of the gradients of the first step, and check that all is of this kind."""
        import torch

        norms = {
            kind: float(torch.stack([value.norm() for value in micro_batches[1][1].values()]).norm())
            for kind, micro_batches in self.by_formula.items()
        }
        norm = float(torch.stack([value.norm() for value in self.gradients[1].values()]).norm())
        scale = min(
            (1.0, 1 / MICRO_BATCHES), key=lambda scale: min(abs(norm - scale * each) for each in norms.values())
        )
        outcome = judge(norm / scale, **norms)
        self.check("right" if outcome.verdict is Verdict.FIXED else "wrong")
        return outcome

    def check(self, kind: str) -> None:
        """Check that all losses and gradients are of this kind. Not every release divides them by the micro-batches."""
        expected = self.by_formula[kind]
        assert len(self.gradients) == len(expected) == 2 * MICRO_BATCHES
        scales = (1.0, 1 / MICRO_BATCHES)
        off = min(
            max(abs(loss - scale * by_formula) for loss, (by_formula, _) in zip(self.losses, expected, strict=False))
            for scale in scales
        )
        gradients_off = min(
            max(
                float((gradients[key] - scale * value).abs().max())
                for gradients, (_, by_formula) in zip(self.gradients, expected, strict=True)
                for key, value in by_formula.items()
            )
            for scale in scales
        )
        evaluation_off = abs(self.losses[-1] - self.evaluated[kind]) if self.name == "A2PO" else 0.0
        if max(off, gradients_off, evaluation_off) > 1e-5:
            raise AssertionError(f"{self.name}: not {kind} by {off}, gradients {gradients_off}, {evaluation_off}")


def _trainable(model: Any) -> dict[str, Any]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def _tokenizer(single: str) -> Any:
    """Return a tokenizer that makes ``single`` of a text, and whose template writes a BOS."""
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    words.padding_side, words.bos_token, words.chat_template = "left", "w59", TEMPLATE
    specials = [("w59", BOS), ("<eos>", EOS)]
    words.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    return words


def _ids(prompt: Any, beginning: list[int]) -> list[int]:
    """Return the ids of a prompt behind this beginning, unless it has its own."""
    text = prompt if isinstance(prompt, str) else prompt[0]["content"]
    return [*beginning, *(3 + int(word[1:]) for word in text.removeprefix("w59 ").split())]


def _completion(prompt: list[int], copy: int) -> list[int]:
    """Return the completion of a prompt, of one to four words and an end, the first of them or another one."""
    number = sum(prompt) + 11 * copy
    return [*(10 + (7 * number + 3 * place) % 50 for place in range(1 + number % 4)), EOS]


def _generate(input_ids: Any, attention_mask: Any, generation_config: Any, **kwargs: Any) -> Any:
    """Complete each prompt as often as the config says. One that comes twice has two completions."""
    import torch

    count = getattr(generation_config, "num_return_sequences", None) or 1
    rows, copies = [], Counter[tuple[int, ...]]()
    for ids, mask in zip(input_ids, attention_mask, strict=True):
        prompt = ids[mask.bool()].tolist()
        for _ in range(count):
            rows.append(_completion(prompt, copies[tuple(prompt)]))
            copies[tuple(prompt)] += 1
    longest = max(map(len, rows))
    completions = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return torch.cat([input_ids.repeat_interleave(count, 0), completions], dim=1)


def _words_of(completion: Any) -> list[int]:
    text = completion if isinstance(completion, str) else completion[0]["content"]
    return [3 + int(word[1:]) for word in text.split()]


def _reward(completion: list[int]) -> float:
    """Return 1 or 0, by all words of a completion. Its end does not count."""
    return float(sum(token for token in completion if token != EOS) % 2)
