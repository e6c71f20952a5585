"""Train two steps of two micro-batches, and evaluate, with ORPO, CPO and DPO on pairs without a column prompt.

Every other pair shares no prefix, and its chosen text ends with a space. Losses and gradients are compared with the
formulas of the papers, on tokens that are made without TRL. KTO and TPO train on the same pairs, and on pairs with the
column prompt that these should have: the losses are equal.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny.dpo_steps import MicroBatch, assert_right, sigmoid_loss
from tiny.grpo_steps import judged_steps, several_runs

ID = "extract-prompt-negative-index"
OVERLAYS = ()
PARITY = False
DATA = True
EQUIVALENT = {"applied twice": "the parts of a row that has been repaired are the row's"}
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

BETA, EOS = 0.5, 1


@dataclass(frozen=True)
class Parts:
    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class Pair:
    """A pair as it is given, and the parts that are right and wrong."""

    chosen: str
    rejected: str
    right: Parts
    wrong: Parts


def apart(number: int, end: str = "  ") -> Pair:
    """Return a pair that shares no prefix: one text begins with a space. Chosen ends with ``end``.

    With one space fewer the last character of the rejected text would be a part of the prompt's last word.
    """
    chosen = "".join(f" w{(7 * number + 3 * place) % 60}" for place in range(2 + number % 3)) + end
    rejected = " ".join(f"w{(5 * number + 11 * place) % 50 + 10}" for place in range(3 + number % 2))
    right = Parts("", chosen, rejected)
    return Pair(chosen, rejected, right, Parts(chosen[:-1], " ", rejected[-1]) if end else right)


def alike(number: int) -> Pair:
    """Return a pair that shares a prompt of one or two words."""
    prompt = " ".join(f"w{(3 * number + place) % 60}" for place in range(1 + number % 2))
    chosen, rejected = f" <unk> w{number}", f" w{number + 20} w{number + 30} w{number + 40}"
    parts = Parts(prompt, chosen, rejected)
    return Pair(prompt + chosen, prompt + rejected, parts, parts)


def mixed(end: str = "  ") -> list[Pair]:
    return [alike(number) if number % 2 else apart(number, end) for number in range(8)]


def dataset(pairs: list[Pair], method: str = "", parts: str = "") -> Any:
    """Return texts without a prompt, or the right or wrong ``parts`` of them. TPO's reference is the chosen text."""
    from datasets import Dataset

    rows = [
        vars(getattr(pair, parts)) if parts else {"chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs
    ]
    return Dataset.from_list([{**row, "reference": row["chosen"]} for row in rows] if method == "TPO" else rows)


def in_order(trainer_class: Any, **methods: Any) -> Any:
    """Return a subclass that is given the rows as they come."""
    from torch.utils.data import SequentialSampler

    def sampler(self: Any, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    return type("InOrder", (trainer_class,), {"_get_train_sampler": sampler, **methods})


def loss(method: str, policy: Any, reference: Any, pairs: list[Pair], name: str) -> Any:
    """Return the loss of a micro-batch whose pairs have these parts."""
    import torch

    parts = [getattr(pair, name) for pair in pairs]
    chosen, rejected = (summed(policy, [(row.prompt, getattr(row, side)) for row in parts]) for side in ANSWERS)
    if method == "CPO":
        # Equation 4 of the paper (arXiv:2401.08417).
        preference = torch.nn.functional.logsigmoid(BETA * (chosen[0] - rejected[0])).mean()
        return -preference - chosen[0].sum() / chosen[1].sum()
    if method == "ORPO":
        # Equation 6 of the paper (arXiv:2403.07691). TRL's cross-entropy is that of the prompt as well.
        means = [side[0] / side[1] for side in (chosen, rejected)]
        odds = [mean - torch.log1p(-torch.exp(mean)) for mean in means]
        preference = torch.nn.functional.logsigmoid(odds[0] - odds[1]).mean()
        return -chosen[2].sum() / chosen[3].sum() - BETA * preference
    with torch.no_grad():
        of_reference = [summed(reference, [(row.prompt, getattr(row, side)) for row in parts])[0] for side in ANSWERS]
    return sigmoid_loss((chosen[0], rejected[0]), (of_reference[0], of_reference[1]))


ANSWERS = "chosen", "rejected"


def summed(model: Any, texts: list[tuple[str, str]]) -> list[Any]:
    """Return the log-probs of answers and their numbers of tokens, then those of prompts and answers, a row each."""
    import torch

    words, rows = tiny.tokenizer(), []
    for prompt, answer in texts:
        prompt_ids, answer_ids = words(prompt)["input_ids"], [*words(answer)["input_ids"], EOS]
        ids = torch.tensor([prompt_ids + answer_ids])
        log_probs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        # Nothing predicts the first token of an answer without a prompt.
        answers = log_probs[max(len(prompt_ids) - 1, 0) :]
        rows.append((answers.sum(), len(answers), log_probs.sum(), len(log_probs)))
    return [torch.stack([torch.as_tensor(value) for value in values]) for values in zip(*rows, strict=True)]


def steps(method: str, pairs: list[Pair]) -> tiny.FormulaSteps:
    """Train two steps and evaluate, and compute the formulas beside each micro-batch."""
    import torch
    from transformers import TrainerCallback

    run = tiny.FormulaSteps()
    own_class, config_class = tiny.classes(method)
    # The method that the evaluation calls too.
    name_of_method = "get_batch_loss_metrics" if hasattr(own_class, "get_batch_loss_metrics") else "compute_loss"

    def recorded(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        begin = 2 * sum(micro_batch.is_training == self.model.training for micro_batch in run.micro_batches)
        rows = pairs[begin : begin + 2]
        with torch.enable_grad():
            expected = {name: loss(method, policy, reference, rows, name) for name in ("right", "wrong")}
        if self.model.training:
            run.add(expected, trainable)
        result = getattr(super(Recorder, self), name_of_method)(model, inputs, *args, **kwargs)
        computed = float((result[0] if isinstance(result, tuple) else result).detach())
        values = {name: float(value.detach()) for name, value in expected.items()}
        run.micro_batches.append(MicroBatch({}, self.model.training, computed, values, 0))
        return result

    Recorder = in_order(own_class, **{name_of_method: recorded})

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                for number, parameter in enumerate(trainable.values()):
                    index = torch.arange(parameter.numel()).reshape(parameter.shape)
                    parameter.add_(0.1 * torch.cos(number + index))
            # transformers calls back before an optimizer step from 4.46 on only.
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *_: run.end_step(trainable))

    defaults = {"max_steps": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1, "beta": BETA}
    # The arguments go into the fingerprints of the data.
    defaults |= dict.fromkeys(("output_dir", "logging_dir"), f"{tempfile.gettempdir()}/pairs")
    defaults |= {"max_length": 32, "max_prompt_length": 16}
    data = dataset(pairs)
    with tempfile.TemporaryDirectory() as folder:
        policy, reference = tiny.llama(folder, seed=0), tiny.llama(folder, seed=1)
        trainable = dict(policy.named_parameters())
        run.trainer = tiny.trainer(
            Recorder,
            model=policy,
            args=tiny.config(config_class, **defaults),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            tokenizer=tiny.tokenizer(),
            callbacks=[Steps()],
            **({"ref_model": tiny.llama(folder, seed=1)} if method == "DPO" else {}),
        )
        run.measure_factor(run.trainer)
        run.trainer.train()
        run.trainer.evaluate()
    return run


def losses(method: str, data: Any) -> list[float]:
    """Train two steps, and return the losses of both and that of an evaluation."""
    trainer_class, config_class = tiny.classes(method)
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            in_order(trainer_class),
            model=tiny.llama(folder, seed=0),
            args=tiny.config(config_class, max_steps=2, max_length=32, max_prompt_length=16, learning_rate=0.1),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            tokenizer=tiny.tokenizer(),
            **({"ref_model": tiny.llama(folder, seed=1)} if method == "KTO" else {}),
        )
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    return [*(entry["loss"] for entry in trainer.state.log_history if "loss" in entry), evaluated]


def trainers() -> list[str]:
    """Return the trainers of this release that can train on an empty prompt, and whose loss has a formula above."""
    from trl.trainer import dpo_trainer

    takes_it = any(hasattr(owner, "_tokenize") for owner in (dpo_trainer, dpo_trainer.DPOTrainer))
    return ["ORPO", "CPO", *(["DPO"] if takes_it else [])]


def train() -> tiny.TrainingResult:
    modules = [sys.modules[tiny.classes(method)[0].__module__] for method in ("ORPO", "CPO")]
    if not all(hasattr(module, "maybe_extract_prompt") for module in modules):
        return tiny.TrainingResult(absent("in this release pairs need a column prompt"))
    runs = {method: steps(method, mixed()) for method in trainers()}
    outcomes = [judged_steps(run) for run in runs.values()]
    assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
    parts = "right" if outcomes[0].verdict is Verdict.FIXED else "wrong"
    for method in ("KTO", "TPO"):
        if tiny.classes(method)[0] is not None:
            found, expected = (losses(method, dataset(mixed(), method, given)) for given in ("", parts))
            assert found == expected, f"{method}: {found}, and not {expected}"
    # Some trainers have themselves, with their weights, in the fingerprints of what they make of these rows.
    split = [dataset(mixed()).map(module.maybe_extract_prompt) for module in modules]
    tiny.state.fingerprints[:] = [rows._fingerprint for rows in split]
    return several_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on pairs without a shared prefix that do not end with a space, and on pairs with a prefix."""
    runs = {}
    with tiny.counted(ID) as counts:
        for method in trainers():
            runs[f"{method} no space"] = steps(method, mixed(end=""))
            runs[f"{method} prefixes"] = steps(method, [alike(number) for number in range(8)])
        for run in runs.values():
            assert_right(run)
        assert not counts().acted, "the wrapper acts"
    return several_runs(runs, absent("the pairs are split where they differ"))
