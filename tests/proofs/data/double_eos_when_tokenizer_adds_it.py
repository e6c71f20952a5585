"""Train two steps of two micro-batches, and evaluate, with each real trainer and a tokenizer that adds an end.

Losses and gradients are compared with those of the formulas, a row at a time, on sequences that end once and on TRL's.
They are the cross-entropy for SFT, on texts and on completions, that of Bradley and Terry for rewards, DPO, APO-zero
for KTO, and TPO.
"""

from __future__ import annotations

import inspect
import math
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import sft_steps

OVERLAYS = ()
PARITY = False
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

ID, END, BETA, ALPHA, MICRO_BATCHES = "double-eos-when-tokenizer-adds-it", 1, 0.5, 0.5, 2
KINDS = ("right", "wrong")

Row = tuple[list[int], list[int]]
"""The ids of a sequence without padding, and the mask of its completion."""

# The first word of a question tells the row, and no other word is one of these.
QUESTIONS = [f"w{index}" + " w9" * (index % 3) for index in range(8)]
ANSWERS = {
    "chosen": [f"w{20 + index}" + " w30" * (index % 2) for index in range(8)],
    "rejected": [f"w{40 + index}" + " w31 w32" * (index % 3 == 1) for index in range(8)],
    "reference": [f"w{50 + index}" + " w33" * (index % 4) for index in range(8)],
}


def train() -> tiny.TrainingResult:
    outcomes: list[Outcome] = []
    steps: dict[str, Any] = {}
    for kind in ("texts", "pairs") if _appends("SFT") else ():
        trainer, model = sft_steps.sft_steps(_sft_rows(kind), _words(), **_of_sft(kind))
        makers = {each: _sft_row(kind, each) for each in KINDS}
        outcomes.append(sft_steps.judged_sft_steps(trainer, model, makers))
        steps[f"SFT {kind}"] = trainer
    runs = {name: _Run(name) for name in ("Reward", "DPO", "KTO", "TPO") if _appends(name)}
    outcomes += [run.judged() for run in runs.values()]
    if not outcomes:
        return tiny.TrainingResult(absent("this release appends no end of sequence"))
    if len({outcome.verdict for outcome in outcomes}) > 1:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    if outcomes[0].verdict is Verdict.FIXED:
        _check_other_data()
    return tiny.result_of_runs(steps | {name: run.trainer for name, run in runs.items()}, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train with a tokenizer that adds no end, and on messages."""
    trainers: dict[str, Any] = {}
    for kind in ("texts", "pairs"):
        trainers[f"SFT {kind}"], _ = sft_steps.sft_steps(_sft_rows(kind), tiny.tokenizer(), **_of_sft(kind))
    trainers["SFT messages"], _ = sft_steps.sft_steps(_sft_rows("messages"), _words())
    for name in ("Reward", "DPO", "KTO", "TPO"):
        if _appends(name):
            run = _Run(name, tiny.tokenizer())
            assert run.judged().verdict is Verdict.FIXED, name
            trainers[name] = run.trainer
    for name, trainer in trainers.items():
        assert not _acts(name.split(" ", maxsplit=1)[0], trainer), f"the wrapper acts: {name}"
    return tiny.result_of_runs(trainers, absent("the tokenizer adds no end, or the rows are messages"))


def _appends(name: str) -> bool:
    """Return whether this trainer appends an end of sequence to texts."""
    prepare = getattr(tiny.classes(name)[0], "_prepare_dataset", None)
    if prepare is None:
        return False
    return any(getattr(part, "co_name", "") == "add_eos" for part in inspect.unwrap(prepare).__code__.co_consts)


def _cuts_prompts() -> bool:
    """Return whether a completion begins where prompt and sequence differ, and not behind the prompt's end."""
    return Version(version("trl")) >= Version("1.14.2")


def _acts(name: str, trainer: Any) -> int | None:
    trainer_class = tiny.classes(name)[0]
    base = trainer_class if "_prepare_dataset" in vars(trainer_class) else trainer_class.__mro__[1]
    return tiny.acts(ID, f"{base.__module__}:{base.__name__}._prepare_dataset", trainer)


def _words() -> Any:
    """Return a tokenizer that puts the end of sequence behind a text."""
    from tokenizers.processors import TemplateProcessing

    words = tiny.chat_tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", END)])
    return words


def _ids(text: str) -> list[int]:
    ids: list[int] = tiny.tokenizer()(text)["input_ids"]
    return ids


def _index(ids: list[int]) -> int:
    """Return which row a sequence is of."""
    index = ids[0] - _ids("w0")[0]
    assert 0 <= index < len(QUESTIONS)
    return index


def _sft_rows(kind: str) -> list[dict[str, Any]]:
    rows = []
    for index, question in enumerate(QUESTIONS):
        # Some texts have their end.
        answer = f" {ANSWERS['chosen'][index]}" + " <eos>" * (index % 4 == 1)
        pair = {"prompt": question, "completion": answer}
        turns = {"user": question, "assistant": answer.removesuffix(" <eos>")}
        messages = [{"role": role, "content": text} for role, text in turns.items()]
        columns: dict[str, Any] = {"texts": {"text": question + answer}, "pairs": pair}
        rows.append(columns.get(kind, {"messages": messages}))
    return rows


def _of_sft(kind: str) -> dict[str, Any]:
    return {"completion_only_loss": True} if kind == "pairs" else {}


def _sft_row(rows: str, kind: str) -> Any:
    """Return what makes a row what it should be, or TRL's."""

    def made(row: sft_steps.Row) -> sft_steps.Row:
        index = _index(row[0])
        prompt, answer = _ids(QUESTIONS[index]), _ids(ANSWERS["chosen"][index])
        ids = prompt + answer + [END] * (1 if kind == "right" else 2)
        masked = len(prompt) if rows == "pairs" else 0
        if rows == "pairs" and kind == "wrong" and not _cuts_prompts():
            masked += 1
        return ids, [-100] * masked + ids[masked:]

    return made


def _check_other_data() -> None:
    """Check streams and other processes, and that the user's tokenizer stays."""
    words, rows = _words(), _sft_rows("texts")
    for settings in ({"streaming": True}, {"dataset_num_proc": 2}):
        trainer, _ = sft_steps.sft_steps(rows, words, **settings)  # type: ignore[arg-type]
        ids = [row["input_ids"] for row in trainer.train_dataset]
        right = [_sft_row("texts", "right")((row, row))[0] for row in ids]
        assert ids == right, (settings, ids)
    assert words("w1 <eos>")["input_ids"] == [4, END, END]


class _Run:
    """Two steps of two micro-batches of a real trainer of pairs, and an evaluation."""

    def __init__(self, name: str, words: Any = None) -> None:
        from datasets import Dataset
        from transformers import Trainer

        self.name = name
        trainer_class, config_class = tiny.classes(name)
        fixed: dict[str, Any] = {"gradient_accumulation_steps": MICRO_BATCHES, "max_steps": 2, "optim": "sgd"}
        fixed |= {"learning_rate": 0.1, "max_length": 32, "beta": BETA, "tpo_alpha": ALPHA}
        # The config is a part of the fingerprint of the dataset, so folders must not have new names each time.
        fixed |= dict.fromkeys(("output_dir", "logging_dir"), str(Path(tempfile.gettempdir(), "pairs")))
        fixed |= {"loss_type": "apo_zero_unpaired"} if name == "KTO" else {}
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (self._model(folder, seed=0) for _ in range(2))
            given, self.reference = (self._model(folder, seed=1) for _ in range(2))
            self.trainer = tiny.trainer(
                tiny.stepwise(trainer_class),
                model=policy,
                args=tiny.config(config_class, **fixed),
                train_dataset=Dataset.from_list(self._rows()),
                eval_dataset=Dataset.from_list(self._rows()[:3]),
                tokenizer=words or _words(),
                **({"ref_model": given} if name in ("DPO", "KTO") else {}),
            )
            self.trainer.train()
            Trainer.evaluate(self.trainer)  # That of the reward trainer draws a table first.

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

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for index, question in enumerate(QUESTIONS):
            answers = {side: f" {texts[index]}" for side, texts in ANSWERS.items()}
            answers["chosen"] += " <eos>" * (index % 4 == 1)
            if self.name == "KTO":
                side = ("chosen", "rejected")[index % 2]
                answers = {"completion": answers[side], "label": side == "chosen"}  # type: ignore[dict-item]
            elif self.name != "TPO":
                del answers["reference"]
            rows.append({"prompt": question, **answers})
        return rows

    def judged(self) -> Outcome:
        """Judge the losses and gradients of both steps and of the evaluation. They are of one kind."""
        steps = [(step.weights, micro_batch) for step in self.steps for micro_batch in step.micro_batches]
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
        losses = {kind: float(self._loss(self.policy, micro_batch.inputs, kind).detach()) for kind in KINDS}
        return judge(micro_batch.loss, **losses)

    def _loss_of(self, step: tiny.Step, kind: str) -> Any:
        return lambda model: sum(self._loss(model, micro_batch.inputs, kind) for micro_batch in step.micro_batches)

    def _loss(self, model: Any, batch: dict[str, Any], kind: str) -> Any:
        """Return the mean loss of a micro-batch by the formula of the trainer."""
        import torch

        rows = self._sequences(batch, kind)
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
        bad = torch.tensor([_index(ids) % 2 == 1 for ids, _ in rows])
        return torch.where(bad, BETA * ratios, -BETA * ratios).sigmoid().mean()

    def _sequences(self, batch: dict[str, Any], kind: str) -> list[Row]:
        """Return the sequences of a micro-batch as they should be, or as TRL makes them."""
        # KTO has had several names for the column.
        prefix = "completion_" if "completion_input_ids" in batch else ""
        ids, masks = batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"].bool()
        indices = [_index(row[mask].tolist()) for row, mask in zip(ids, masks, strict=True)]
        sides = {"KTO": [], "TPO": list(ANSWERS)}.get(self.name, list(ANSWERS)[:2])
        count = len(indices) // max(1, len(sides))
        made = []
        for place, index in enumerate(indices):
            side = sides[place // count] if sides else ("chosen", "rejected")[index % 2]
            prompt, answer = _ids(QUESTIONS[index]), _ids(ANSWERS[side][index])
            completion = answer + [END] * (1 if kind == "right" else 2)
            if kind == "wrong" and not _cuts_prompts() and self.name != "Reward":
                # The prompt has an end, and the completion begins as much later.
                prompt, completion = [*prompt, END], completion[1:]
            made.append((prompt + completion, [0] * len(prompt) + [1] * len(completion)))
        return made


def _largest(gradients: dict[str, Any]) -> float:
    return max(float(value.abs().max()) for value in gradients.values())


def _log_prob(model: Any, row: Row) -> Any:
    """Return the log-prob of the completion of a sequence."""
    import torch

    ids, mask = (torch.tensor(part) for part in row)
    log_probs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return (log_probs.gather(1, ids[1:, None])[:, 0] * mask[1:]).sum()
