"""Train two steps of two micro-batches, and evaluate, with the real RewardTrainer on conversations that have a BOS.

Losses and gradients are compared with the formula of Bradley and Terry on sequences that begin once, and on those that
begin twice. The ids are made without TRL.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny.backward import measure_factors

OVERLAYS = ()
PARITY = True
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

BEGINNING, SIDES, TIMES = 62, ("chosen", "rejected"), {"right": 1, "wrong": 2}


def train() -> tiny.TrainingResult:
    from trl import RewardTrainer

    if not (_tokenizes_texts() or hasattr(RewardTrainer, "_prepare_dataset")):
        return tiny.TrainingResult(absent("the trainer takes no conversations"))
    run = _Run(_conversations())
    outcome = run.judged()
    times = 1 if outcome.verdict is Verdict.FIXED else 2
    right = [{side: [BEGINNING, *ids] for side, ids in row.items()} for row in _ids_without_beginning()]
    expected = [{side: [BEGINNING] * (times - 1) + ids for side, ids in row.items()} for row in right]
    for dataset, rows in ((run.trainer.train_dataset, expected), (run.trainer.eval_dataset, expected[:3])):
        assert _ids_of(dataset) == rows, f"the rows are {_ids_of(dataset)}: expected {rows}"
    if times == 1:
        _check_other_data(right)
    step = run.trainer.steps[0]
    return tiny.TrainingResult(outcome, sum(part.loss for part in step.micro_batches), step.gradients)


def unaffected() -> tiny.TrainingResult:
    """Train on what nothing begins twice: texts, conversations, and texts and tokens that begin twice by themselves."""
    silent = tiny.chat_tokenizer()
    silent.bos_token, silent.chat_template = "w59", _words().chat_template
    texts = [{side: row[side].removeprefix("w59 ") for side in SIDES} for row in _texts()]
    tokens = []
    for row in _ids_without_beginning():
        ids = {side: [BEGINNING] * 2 + row[side] for side in SIDES}
        named = {f"input_ids_{side}": ids[side] for side in SIDES}
        named |= {f"{side}_input_ids": ids[side] for side in SIDES}  # as 0.24.0 has it
        tokens.append(named | {f"attention_mask_{side}": [1] * len(ids[side]) for side in SIDES})
    runs = {
        "texts": _Run(texts),
        "a tokenizer that adds nothing": _Run(_conversations(), silent),
        "twice": _Run([{side: f"w59 {row[side]}" for side in SIDES} for row in _texts()], silent),
        "tokens": _Run(tokens),
    }
    for name, run in runs.items():
        outcome = run.judged()
        assert (outcome.verdict is Verdict.FIXED) == (name not in ("twice", "tokens")), f"{name}: {outcome}"
    trainers = {name: run.trainer for name, run in runs.items()}
    return tiny.result_of_runs(trainers, absent("the texts begin once, or are tokens"))


def _tokenizes_texts() -> bool:
    """Return whether the trainer renders conversations to texts, as up to 0.23.1."""
    from trl.trainer import reward_trainer

    return hasattr(reward_trainer, "maybe_apply_chat_template")


def _words() -> Any:
    """Return a tokenizer that puts the word w59 before a text, and whose chat template does so, too."""
    from tokenizers.processors import TemplateProcessing

    words = tiny.chat_tokenizer()
    words.bos_token = "w59"
    words.chat_template = "w59 " + words.chat_template.replace("w58", "w56").replace("w59", "w57")
    words.backend_tokenizer.post_processor = TemplateProcessing(single="w59 $A", special_tokens=[("w59", BEGINNING)])
    return words


def _conversations() -> list[dict[str, Any]]:
    """Return pairs of conversations of several lengths."""
    # 0.24.0 takes the default of transformers, which is another one in 5.0.
    settings = {"chat_template_kwargs": {"return_dict": False}} if version("trl") == "0.24.0" else {}
    rows = []
    for index in range(8):
        question = {"role": "user", "content": " ".join(f"w{index + place}" for place in range(1 + index % 3))}
        answers = {
            "chosen": " ".join(f"w{(7 * index + 3 * place) % 56}" for place in range(2 + index % 2)),
            "rejected": " ".join(f"w{(5 * index + 11 * place) % 56}" for place in range(1 + index % 4)),
        }
        pair = {side: [question, {"role": "assistant", "content": answers[side]}] for side in SIDES}
        rows.append(pair | settings)
    return rows


def _texts() -> list[dict[str, str]]:
    """Return the text of each conversation."""
    turn = "w56 {} <eos> w57 {} <eos> "
    return [
        {side: "w59 " + turn.format(*(message["content"] for message in row[side])) for side in SIDES}
        for row in _conversations()
    ]


def _ids_without_beginning() -> list[dict[str, list[int]]]:
    words = tiny.tokenizer()
    return [{side: words(row[side])["input_ids"][1:] for side in SIDES} for row in _texts()]


def _ids_of(dataset: Any) -> list[dict[str, list[int]]]:
    """Return the ids of each side. The masks, which 0.24.0 leaves to the collator, are as long."""
    names = {side: next(name for name in _names(side) if name in dataset.column_names) for side in SIDES}
    for row in dataset:
        for side in SIDES:
            assert row.get(f"attention_mask_{side}", [1] * len(row[names[side]])) == [1] * len(row[names[side]])
    return [{side: row[names[side]] for side in SIDES} for row in dataset]


def _names(side: str) -> tuple[str, ...]:
    return f"input_ids_{side}", f"{side}_input_ids", f"{side}_ids"


def _check_other_data(right: list[dict[str, list[int]]]) -> None:
    """Check texts that were rendered before, other processes, and rows that are as long as they may be."""
    longest = max(len(ids) for row in right for ids in row.values())
    runs = {
        "processes": _Run(_conversations(), dataset_num_proc=2),
        "limit": _Run(_conversations(), max_length=longest),
    }
    if _tokenizes_texts():  # 0.24.0 begins texts twice.
        runs["texts"] = _Run(_texts())
    for name, run in runs.items():
        assert _ids_of(run.trainer.train_dataset) == right, f"{name}: {_ids_of(run.trainer.train_dataset)}"
    assert _words()("w59 w1")["input_ids"] == [BEGINNING, BEGINNING, 4]


class _Run:
    """Two steps of two micro-batches of the real trainer, and an evaluation."""

    def __init__(self, rows: list[dict[str, Any]], words: Any = None, **settings: Any) -> None:
        import torch
        from datasets import Dataset
        from transformers import AutoModelForSequenceClassification, Trainer
        from trl import RewardConfig, RewardTrainer

        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
        defaults = {"optim": "sgd", "learning_rate": 0.1, "max_length": 32, "center_rewards_coefficient": None}
        with tempfile.TemporaryDirectory() as folder:
            tiny.llama(folder, seed=0)
            path = str(Path(folder, "llama-0"))
            model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
        score = model.score.weight
        score.data = 0.3 * torch.cos(torch.arange(score.numel())).reshape(score.shape)
        self.trainer = tiny.trainer(
            tiny.stepwise(RewardTrainer),
            model=model,
            args=tiny.config(RewardConfig, **{**defaults, **sizes, **settings}),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:3]),
            tokenizer=words or _words(),
        )
        factors = measure_factors(self.trainer)
        self.trainer.train()
        Trainer.evaluate(self.trainer)  # That of TRL draws a table first.
        (factor,) = factors
        for step in self.trainer.steps:
            step.gradients = {name: gradient / factor for name, gradient in step.gradients.items()}

    def judged(self) -> Outcome:
        """Judge the losses and gradients of both steps and of the evaluation. They are of one kind."""
        outcomes = []
        for step in self.trainer.steps:
            assert len(step.micro_batches) == 2
            outcomes += [self._judged(step.weights, micro_batch) for micro_batch in step.micro_batches]
            kind = "right" if outcomes[-1].verdict is Verdict.FIXED else "wrong"
            difference = step.difference(self._gradients(step, kind))
            assert difference < 1e-5, f"the gradients differ from the {kind} ones by {difference}"
        after = self.trainer.model.state_dict()
        outcomes += [self._judged(after, evaluation) for evaluation in self.trainer.evaluations]
        shapes = len(self.trainer.steps), len(self.trainer.evaluations)
        if shapes != (2, 2) or len({outcome.verdict for outcome in outcomes}) != 1:
            raise AssertionError(f"expected two steps and two batches of an evaluation, of one kind: {outcomes}")
        return outcomes[0]

    def _judged(self, weights: dict[str, Any], micro_batch: tiny.MicroBatch) -> Outcome:
        losses = {kind: float(self._loss(weights, micro_batch, kind).detach()) for kind in TIMES}
        return judge(micro_batch.loss, **losses)

    def _gradients(self, step: tiny.Step, kind: str) -> dict[str, Any]:
        import torch

        weights = {name: value.clone().requires_grad_() for name, value in step.weights.items()}
        loss = sum(self._loss(weights, micro_batch, kind) for micro_batch in step.micro_batches)
        names = list(step.gradients)
        return dict(zip(names, torch.autograd.grad(loss, [weights[name] for name in names]), strict=True))

    def _loss(self, weights: dict[str, Any], micro_batch: tiny.MicroBatch, kind: str) -> Any:
        """Return the mean loss of Bradley and Terry over the pairs, a row at a time and so without padding."""
        import torch

        batch = micro_batch.inputs
        rewards = []
        for side in range(2):
            if "input_ids" in batch:  # From 0.24.0 on the rejected rows are below the chosen ones.
                ids, mask = (batch[name].chunk(2)[side] for name in ("input_ids", "attention_mask"))
            else:
                ids, mask = (batch[f"{name}_{SIDES[side]}"] for name in ("input_ids", "attention_mask"))
            rows = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
            rewards.append(torch.stack([self._reward(weights, _begun(row, TIMES[kind])) for row in rows]))
        return -torch.nn.functional.logsigmoid(rewards[0] - rewards[1]).mean()

    def _reward(self, weights: dict[str, Any], ids: list[int]) -> Any:
        """Return the reward of a sequence, by the weights of a Llama and of its score."""
        import torch
        from transformers import LlamaModel

        inner = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
        keywords = {"input_ids": torch.tensor([ids]), "use_cache": False}
        hidden = torch.func.functional_call(LlamaModel(self.trainer.model.config), inner, kwargs=keywords)
        return weights["score.weight"][0] @ hidden.last_hidden_state[0, -1]


def _begun(ids: list[int], times: int) -> list[int]:
    """Return a sequence that begins so many times."""
    first = next(place for place, token in enumerate(ids) if token != BEGINNING)
    return [BEGINNING] * times + ids[first:]
