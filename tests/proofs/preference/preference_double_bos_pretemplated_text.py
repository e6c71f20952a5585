"""Train two steps of two micro-batches, and evaluate, with each real trainer on texts that begin with a beginning.

Losses and gradients are compared with those of the formulas, a row at a time, on sequences that begin once and on those
that begin twice. They are those of Bradley and Terry for rewards, DPO, APO-zero for KTO, and TPO.
"""

from __future__ import annotations

import math
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

BEGINNING, GOOD, BETA, ALPHA, MICRO_BATCHES = 62, 53, 0.5, 0.5, 2
TIMES = {"right": 1, "wrong": 2}
TURN = "w56 {} <eos> w57 "

Row = tuple[list[int], list[int]]
"""The ids of a sequence without padding, and the mask of its completion."""


def train() -> tiny.TrainingResult:
    runs = {name: _Run(name, _rows(name)) for name in _names()}
    outcomes = [run.judged() for run in runs.values()]
    if not outcomes:
        return tiny.TrainingResult(absent("texts are tokenized without special tokens"))
    if len({outcome.verdict for outcome in outcomes}) > 1:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    if outcomes[0].verdict is Verdict.FIXED:
        other = _Run("Reward", _rows("Reward"), dataset_num_proc=2)
        assert other.judged().verdict is Verdict.FIXED
        assert _words()("w59 w1")["input_ids"] == [BEGINNING, BEGINNING, 4], "the user's tokenizer is changed"
    return tiny.result_of_runs({name: run.trainer for name, run in runs.items()}, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on texts without a beginning, with a tokenizer that adds none, and on messages."""
    silent = tiny.tokenizer()
    silent.bos_token = "w59"
    runs = {f"{name} texts": _Run(name, _rows(name, beginning="")) for name in _names()}
    for name in _names()[:2]:
        runs[f"{name} silent"] = _Run(name, _rows(name), silent)
        runs[f"{name} messages"] = _Run(name, _rows(name, messages=True))
    for name, run in runs.items():
        assert run.judged().verdict is Verdict.FIXED, name
        assert not run.acts, f"the wrapper acts: {name}"
    trainers = {name: run.trainer for name, run in runs.items()}
    return tiny.result_of_runs(trainers, absent("the texts begin once, or are messages"))


def _names() -> list[str]:
    """Return the trainers of this release that leave the special tokens to the tokenizer."""
    classes = {name: tiny.classes(name)[0] for name in ("Reward", "DPO", "KTO", "TPO")}
    return [
        name
        for name, trainer_class in classes.items()
        if hasattr(trainer_class, "_prepare_dataset") and not hasattr(trainer_class, "tokenize_row")
    ]


def _words() -> Any:
    """Return a tokenizer that puts the word w59 before a text, and whose chat template does so, too."""
    from tokenizers.processors import TemplateProcessing

    words = tiny.chat_tokenizer()
    words.bos_token = "w59"
    words.chat_template = "w59 " + words.chat_template.replace("w58", "w56").replace("w59", "w57")
    words.backend_tokenizer.post_processor = TemplateProcessing(single="w59 $A", special_tokens=[("w59", BEGINNING)])
    return words


def _rows(name: str, beginning: str = "w59 ", *, messages: bool = False) -> list[dict[str, Any]]:
    """Return eight rows of several lengths in the format of a trainer. The word w50 begins the good completions."""
    rows = []
    for index in range(8):
        question = " ".join(f"w{index + place}" for place in range(1 + index % 3))
        answers = {
            "chosen": " ".join(["w50", *(f"w{(7 * index + 3 * place) % 50}" for place in range(1 + index % 2))]),
            "rejected": " ".join(f"w{(5 * index + 11 * place) % 50}" for place in range(1 + index % 4)),
            "reference": " ".join(["w50", *(f"w{(3 * index + 7 * place) % 50}" for place in range(index % 3))]),
        }
        prompt: Any = beginning + TURN.format(question)
        completions: dict[str, Any] = {key: f"{answer} <eos> " for key, answer in answers.items()}
        if messages:
            prompt = [{"role": "user", "content": question}]
            completions = {key: [{"role": "assistant", "content": answer}] for key, answer in answers.items()}
        if name == "KTO":
            side = ("chosen", "rejected")[index % 2]
            completions = {"completion": completions[side], "label": side == "chosen"}
        elif name != "TPO":
            del completions["reference"]
        rows.append({"prompt": prompt, **completions})
        if messages and version("trl") == "0.24.0":
            # It takes the default of transformers, which is another one in 5.0.
            rows[-1]["chat_template_kwargs"] = {"return_dict": False}
    return rows


class _Run:
    """Two steps of two micro-batches of a real trainer, and an evaluation."""

    def __init__(self, name: str, rows: list[dict[str, Any]], words: Any = None, **settings: Any) -> None:
        from datasets import Dataset
        from transformers import Trainer

        self.name = name
        trainer_class, config_class = tiny.classes(name)
        fixed: dict[str, Any] = {"gradient_accumulation_steps": MICRO_BATCHES, "max_steps": 2, "optim": "sgd"}
        fixed |= {"learning_rate": 0.1, "max_length": 32, "beta": BETA, "tpo_alpha": ALPHA}
        # The config is a part of the fingerprint of the dataset, so folders must not have new names each time.
        fixed |= dict.fromkeys(("output_dir", "logging_dir"), str(Path(tempfile.gettempdir(), "preference")))
        fixed |= {"loss_type": "apo_zero_unpaired"} if name == "KTO" else {}
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (self._model(folder, seed=0) for _ in range(2))
            given, self.reference = (self._model(folder, seed=1) for _ in range(2))
            self.trainer = tiny.trainer(
                tiny.stepwise(trainer_class),
                model=policy,
                args=tiny.config(config_class, **fixed, **settings),
                train_dataset=Dataset.from_list(rows),
                eval_dataset=Dataset.from_list(rows[:3]),
                tokenizer=words or _words(),
                **({"ref_model": given} if name in ("DPO", "KTO") else {}),
            )
            self.trainer.train()
            Trainer.evaluate(self.trainer)  # That of the reward trainer draws a table first.
        base = trainer_class if "_prepare_dataset" in vars(trainer_class) else trainer_class.__mro__[1]
        target = f"{base.__module__}:{base.__name__}._prepare_dataset"
        self.acts = tiny.acts("preference-double-bos-pretemplated-text", target, self.trainer)

    def _model(self, folder: str, *, seed: int) -> Any:
        import torch
        from transformers import AutoModelForSequenceClassification

        model = tiny.llama(folder, seed=seed)
        if self.name == "Reward":
            path = str(Path(folder, f"llama-{seed}"))
            model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
            score = model.score.weight
            score.data = 0.3 * torch.cos(torch.arange(score.numel())).reshape(score.shape)
        return model

    def judged(self) -> Outcome:
        """Judge the losses and gradients of both steps and of the evaluation. They are of one kind."""
        steps = [(step.weights, micro_batch) for step in self.trainer.steps for micro_batch in step.micro_batches]
        after = self.trainer.model.state_dict()
        evaluations = [(after, micro_batch) for micro_batch in self.trainer.evaluations]
        # KTO of some releases evaluates by another method.
        assert (len(steps), len(evaluations)) == (4, 0 if hasattr(self.trainer, "get_batch_loss_metrics") else 2)
        outcomes = [self._judged(weights, micro_batch) for weights, micro_batch in steps + evaluations]
        if len({outcome.verdict for outcome in outcomes}) != 1:
            raise AssertionError(f"{self.name}: the micro-batches are of several kinds: {outcomes}")
        kind = "right" if outcomes[0].verdict is Verdict.FIXED else "wrong"
        expected = [
            tiny.expected_gradients(self.policy, step.weights, self._loss_of(step, kind)) for step in self.steps
        ]
        # Releases of transformers divide by the micro-batches once, twice or not at all.
        ratio = _largest(self.steps[0].gradients) / _largest(expected[0])
        factor = min((MICRO_BATCHES**-power for power in range(3)), key=lambda each: abs(math.log(ratio / each)))
        for step, gradients in zip(self.steps, expected, strict=True):
            difference = step.difference({key: factor * value for key, value in gradients.items()})
            assert difference < 1e-5 * max(1.0, _largest(gradients)), f"{self.name}: not {kind} by {difference}"
        return outcomes[0]

    @property
    def steps(self) -> list[tiny.Step]:
        steps: list[tiny.Step] = self.trainer.steps
        return steps

    def _judged(self, weights: dict[str, Any], micro_batch: tiny.MicroBatch) -> Outcome:
        self.policy.load_state_dict(weights)
        losses = {kind: float(self._loss(self.policy, micro_batch.inputs, kind).detach()) for kind in TIMES}
        return judge(micro_batch.loss, **losses)

    def _loss_of(self, step: tiny.Step, kind: str) -> Any:
        return lambda model: sum(self._loss(model, micro_batch.inputs, kind) for micro_batch in step.micro_batches)

    def _loss(self, model: Any, batch: dict[str, Any], kind: str) -> Any:
        """Return the mean loss of a micro-batch by the formula of the trainer."""
        import torch

        rows = [_begun(row, TIMES[kind]) for row in _without_padding(batch)]
        log_sigmoid = torch.nn.functional.logsigmoid
        if self.name == "Reward":
            chosen, rejected = torch.stack([model(torch.tensor([ids])).logits[0, 0] for ids, _ in rows]).chunk(2)
            return -log_sigmoid(chosen - rejected).mean()
        log_probs = torch.stack([_log_prob(model, row) for row in rows])
        if self.name == "TPO":
            chosen, rejected, gold = log_probs.chunk(3)
            count = sum(sum(mask) for _, mask in rows[-len(gold) :])
            return -log_sigmoid(BETA * (chosen - rejected)).mean() - ALPHA * gold.sum() / count
        ratios = log_probs - torch.stack([_log_prob(self.reference, row) for row in rows]).detach()
        if self.name == "DPO":
            chosen, rejected = ratios.chunk(2)
            return -log_sigmoid(BETA * (chosen - rejected)).mean()
        signs = torch.tensor([-1.0 if GOOD in ids else 1.0 for ids, _ in rows])
        return (signs * BETA * ratios).sigmoid().mean()


def _largest(gradients: dict[str, Any]) -> float:
    return max(float(value.abs().max()) for value in gradients.values())


def _without_padding(batch: dict[str, Any]) -> list[Row]:
    """Return the rows of a batch. KTO has had several names for their columns."""
    prefix = "completion_" if "completion_input_ids" in batch else ""
    sequences, attention = (batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask"))
    completions = batch.get("completion_mask", attention)
    if "completion_labels" in batch:
        completions = (batch["completion_labels"] != -100).long()
    rows = zip(sequences, attention.bool(), completions, strict=True)
    return [(ids[kept].tolist(), mask[kept].tolist()) for ids, kept, mask in rows]


def _begun(row: Row, times: int) -> Row:
    """Return a sequence that begins so many times."""
    ids, mask = row
    first = next(place for place, token in enumerate(ids) if token != BEGINNING)
    return [BEGINNING] * times + ids[first:], [0] * times + mask[first:]


def _log_prob(model: Any, row: Row) -> Any:
    """Return the log-prob of the completion of a sequence."""
    import torch

    ids, mask = (torch.tensor(part) for part in row)
    log_probs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return (log_probs.gather(1, ids[1:, None])[:, 0] * mask[1:]).sum()
