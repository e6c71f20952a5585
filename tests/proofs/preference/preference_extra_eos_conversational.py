"""Train two steps of two micro-batches, and evaluate, with the real trainers of ORPO, CPO, KTO and BCO.

The data are conversations whose template ends each message with an end of sequence and a line break. Losses and
gradients are compared with the formulas of the papers on the tokens of the template. Wrong are those with one more end.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping
from functools import partial
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny.dpo_steps import MicroBatch, assert_right
from tiny.grpo_steps import judged_steps, several_runs

ID = "preference-extra-eos-conversational"

OVERLAYS = ("scikit-learn",)
PARITY = False
DATA = True
MUTANTS_ON = ("0.12.1",)
"""It has trainers that take the tokenizer by its old name, too."""
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

BETA, EOS, BREAK = 0.5, 1, 62
METHODS = ("ORPO", "CPO", "KTO", "BCO")
EQUIVALENT = {"applied twice": "the inner one is given answers that end"}


def tokenizer(closing: str = "<eos> \n", eos_token: str = "<eos>") -> Any:
    """Return a tokenizer of 60 words, of which the last is a line break, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(59)), "\n"]
    word_level = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
    chat = PreTrainedTokenizerFast(
        tokenizer_object=word_level, pad_token="<pad>", eos_token=eos_token, unk_token="<unk>"
    )
    chat.model_input_names = ["input_ids", "attention_mask"]
    chat.chat_template = (
        "{% for message in messages %}{{ 'w57 ' if message['role'] == 'user' else 'w58 ' }}{{ message['content'] }}"
        "{{ " + repr(f" {closing} ") + " }}{% endfor %}{% if add_generation_prompt %}{{ 'w58 ' }}{% endif %}"
    )
    return chat


def preferences(method: str, form: str = "conversations") -> Any:
    """Return rows of conversations, of their contents (``plain``), or of their texts by the template (``rendered``)."""
    from datasets import Dataset

    words = tokenizer()

    def row(prompt: str, **answers: str) -> dict[str, Any]:
        if form == "plain":
            return {"prompt": prompt, **answers}
        asked = [{"role": "user", "content": prompt}]
        messages = {name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()}
        if form == "conversations":
            return {"prompt": asked, **messages}
        text = words.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        whole = {name: words.apply_chat_template(asked + messages[name], tokenize=False) for name in messages}
        return {"prompt": text, **{name: whole[name].removeprefix(text) for name in whole}}

    rows: list[dict[str, Any]] = []
    for index in range(8):
        prompt = " ".join(f"w{index + place}" for place in range(2 + index % 3))
        chosen = " ".join(f"w{(7 * index + 3 * place) % 57}" for place in range(2 + index % 2))
        rejected = " ".join(f"w{(5 * index + 11 * place) % 57}" for place in range(3 + index % 3))
        if method in ("ORPO", "CPO"):
            rows.append(row(prompt, chosen=chosen, rejected=rejected))
        else:
            is_chosen = index % 2 == 0
            rows.append(row(prompt, completion=chosen if is_chosen else rejected) | {"label": is_chosen})
    return Dataset.from_list(rows)


def folders() -> dict[str, Any]:
    # The arguments go into the fingerprints of the data.
    return dict.fromkeys(("output_dir", "logging_dir"), f"{tempfile.gettempdir()}/preferences")


def made(method: str, data: Any, words: Any, trainer_class: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Return a trainer of these data, and its untouched reference. The policy has moved away from it."""
    import numpy
    import torch

    # Up to 0.24 BCO shuffles its data by this generator.
    numpy.random.seed(0)
    own_class, config_class = tiny.classes(method)
    defaults = {"max_steps": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5, "beta": BETA}
    defaults |= {"max_length": 32, "max_prompt_length": 16, **folders()}
    with tempfile.TemporaryDirectory() as folder:
        policy, reference, untouched = (tiny.llama(folder, seed=seed) for seed in (0, 1, 1))
        with torch.no_grad():
            for number, parameter in enumerate(policy.parameters()):
                parameter.add_(0.1 * torch.cos(number + torch.arange(parameter.numel()).reshape(parameter.shape)))
        trainer = tiny.trainer(
            trainer_class or own_class,
            model=policy,
            args=tiny.config(config_class, **{**defaults, **settings}),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            tokenizer=words,
            **({} if method in ("ORPO", "CPO") else {"ref_model": reference}),
        )
    return trainer, untouched


def steps(method: str, data: Any = None, words: Any = None) -> tiny.FormulaSteps:
    """Train two steps and evaluate, and compute the formulas beside each micro-batch."""
    import torch
    from transformers import TrainerCallback

    run = tiny.FormulaSteps()
    own_class, _ = tiny.classes(method)
    formulas: dict[str, Any] = {"ORPO": orpo_loss, "CPO": cpo_loss, "KTO": kto_loss}
    formula = formulas[method] if method in formulas else BcoLoss(own_class)

    class Recorder(own_class):  # type: ignore[misc, valid-type]
        def get_batch_loss_metrics(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            batch = {name: inputs[name] for name in inputs}
            policy = run.trainer.model
            with torch.enable_grad():
                expected = {
                    name: formula(name, policy, untouched, with_ends(batch, ends))
                    for name, ends in {"right": 1, "wrong": 2}.items()
                }
            if policy.training:
                run.add(expected, trainable)
            result = super().get_batch_loss_metrics(model, inputs, *args, **kwargs)
            values = {name: float(value.detach()) for name, value in expected.items()}
            run.micro_batches.append(MicroBatch(batch, policy.training, float(result[0].detach()), values, 1))
            return result

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            # transformers calls back before an optimizer step from 4.46 on only.
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *_: run.end_step(trainable))

    data = preferences(method) if data is None else data
    run.trainer, untouched = made(method, data, words or tokenizer(), Recorder)
    trainable = {name: value for name, value in run.trainer.model.named_parameters() if value.requires_grad}
    run.trainer.add_callback(Steps())
    run.measure_factor(run.trainer)
    run.trainer.train()
    run.trainer.evaluate()
    return run


def with_ends(batch: Mapping[str, Any], ends: int) -> dict[str, Any]:
    """Return the batch with so many ends of sequence in all: that of the template, and those behind the line break.

    A completion without that line break has its only end in any case.
    """
    import torch

    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    changed = dict(batch)
    for name in [name.removesuffix("_labels") for name in batch if name.endswith("_labels")]:
        rows, labels = [], []
        for tokens, attention, label in zip(*(batch[f"{name}_{part}"] for part in PARTS), strict=True):
            tokens, label = tokens[attention == 1], label[attention == 1]
            is_closed = BREAK in tokens[label > 0][-2:]
            if is_closed:
                last = int((tokens == BREAK).nonzero()[-1])
                more = torch.full((ends - 1,), EOS)
                tokens, label = (torch.cat([part[: last + 1], more]) for part in (tokens, label))
            rows.append(tokens)
            labels.append(label)
        padded = pad(rows), pad([torch.ones_like(row) for row in rows]), pad(labels, padding_value=-100)
        changed |= {f"{name}_{part}": value for part, value in zip(PARTS, padded, strict=True)}
    return changed


PARTS = ("input_ids", "attention_mask", "labels")


def log_probs(model: Any, batch: Mapping[str, Any], name: str, *, of_prompts: bool = False) -> tuple[Any, Any]:
    """Return summed log-probs of the completions, or of whole sequences, and the numbers of tokens in the sums."""
    ids, attention, labels = (batch[f"{name}_{part}"] for part in PARTS)
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
    counted = (attention if of_prompts else (labels != -100).long())[:, 1:]
    of_tokens = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return (of_tokens * counted).sum(1), counted.sum(1)


def orpo_loss(name: str, policy: Any, untouched: Any, batch: Mapping[str, Any]) -> Any:
    """Return the loss of ORPO (arXiv:2403.07691, equation 6). TRL's cross-entropy is that of the prompt as well."""
    import torch

    def log_odds(side: str) -> Any:
        total, count = log_probs(policy, batch, side)
        return total / count - torch.log1p(-torch.exp(total / count))

    total, count = log_probs(policy, batch, "chosen", of_prompts=True)
    odds_ratio = torch.nn.functional.logsigmoid(log_odds("chosen") - log_odds("rejected"))
    return -total.sum() / count.sum() - BETA * odds_ratio.mean()


def cpo_loss(name: str, policy: Any, untouched: Any, batch: Mapping[str, Any]) -> Any:
    """Return the loss of CPO (arXiv:2401.08417, equation 4)."""
    import torch

    (chosen, count), (rejected, _) = (log_probs(policy, batch, side) for side in ("chosen", "rejected"))
    return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean() - chosen.sum() / count.sum()


def gains(policy: Any, untouched: Any, batch: Mapping[str, Any], name: str) -> Any:
    import torch

    with torch.no_grad():
        reference, _ = log_probs(untouched, batch, name)
    return log_probs(policy, batch, name)[0] - reference


def kto_loss(name: str, policy: Any, untouched: Any, batch: Mapping[str, Any]) -> Any:
    """Return the loss of KTO (arXiv:2402.01306, equation 8), with the divergence as its section 4.1 estimates it."""
    import torch

    divergence = gains(policy, untouched, batch, "KL_completion").mean().detach().clamp(min=0)
    gain = BETA * (gains(policy, untouched, batch, "completion") - divergence)
    return (1 - torch.where(torch.tensor(batch["label"]), gain, -gain).sigmoid()).mean()


class BcoLoss:
    """The loss of BCO (arXiv:2404.04656, equation 7). The shift is the mean of the rewards until then.

    Up to 0.16.1 those of the evaluation count, too.
    """

    def __init__(self, trainer_class: Any) -> None:
        self.counts_evaluation = "do_train" not in inspect.signature(trainer_class.bco_loss).parameters
        self.rewards: dict[str, list[Any]] = {"right": [], "wrong": []}

    def __call__(self, name: str, policy: Any, untouched: Any, batch: Mapping[str, Any]) -> Any:
        import torch

        rewards = BETA * gains(policy, untouched, batch, "completion")
        if policy.training or self.counts_evaluation:
            self.rewards[name].append(rewards.detach().mean())
        gain = rewards - torch.stack(self.rewards[name]).mean()
        gain = torch.where(torch.tensor(batch["label"]), gain, -gain)
        return -torch.nn.functional.logsigmoid(gain).mean()


def train() -> tiny.TrainingResult:
    runs = {method: steps(method) for method in METHODS if adds_ends(method)}
    if not runs:
        return tiny.TrainingResult(absent("the trainers do not apply a chat template, or add no end to what has one"))
    outcomes = {method: judged_steps(run) for method, run in runs.items()}
    (verdict,) = {outcome.verdict for outcome in outcomes.values()}
    for method, run in runs.items():
        expected = of_template(method, [EOS] * (verdict is not Verdict.FIXED))
        for data in (run.trainer.train_dataset, run.trainer.eval_dataset):
            completions = completions_of(data)
            assert sorted(completions) == sorted(expected[: len(completions)])
        if trl_hotfix.status()[ID].state.value == "applied":
            check_truncation(method)
    return several_runs(runs, next(iter(outcomes.values())))


def adds_ends(method: str) -> bool:
    """Return whether the trainer exists, prepares conversations, and adds ends of sequence to them."""
    trainer_class, _ = tiny.classes(method)
    if trainer_class is None:
        return False
    method_of_loss = getattr(trainer_class, "get_batch_loss_metrics", None)
    names = vars(inspect.getmodule(method_of_loss)) if method_of_loss else {}
    return "maybe_apply_chat_template" in names and (
        hasattr(trainer_class, "tokenize_row") or "_process_tokens" in names
    )


def of_template(method: str, more: list[int]) -> list[list[int]]:
    """Return the tokens of each completion as the template renders it, and ``more`` behind them."""
    words, names = tokenizer(), ("chosen", "rejected", "completion")
    rows = preferences(method, "rendered")
    return [words(row[name])["input_ids"] + more for row in rows for name in names if name in row]


def completions_of(data: Any) -> list[list[int]]:
    """Return the tokens of the completions, without those of KTO's divergence, which are judged by the loss."""
    names = [f"{name}_labels" for name in ("chosen", "rejected", "completion")]
    return [[token for token in row[name] if token != -100] for row in data for name in names if name in row]


def check_truncation(method: str) -> None:
    """Check that ``max_length`` leaves what it leaves of texts of which TRL sees the end."""
    rendered, sees_the_end = preferences(method, "rendered"), tokenizer(eos_token="\n")
    for limit in (8, 11):
        settings = {"max_length": limit, "max_prompt_length": 5}
        cut, _ = made(method, preferences(method), tokenizer(), **settings)
        right, _ = made(method, rendered, sees_the_end, **settings)
        assert cut.train_dataset.to_list() == right.train_dataset.to_list()


def unaffected() -> tiny.TrainingResult:
    """Train on texts, also those of the template, and with templates that end with the end or leave it out."""
    forms: dict[str, tuple[tuple[str, Any, Any], ...]] = {
        "ORPO": (("plain", "plain", None), ("rendered", "rendered", None)),
        "CPO": (("no end", "conversations", ""),),
        "KTO": (("end", "conversations", "<eos>"), ("rendered", "rendered", None)),
        "BCO": (("plain", "plain", None),),
    }
    runs: dict[str, tiny.FormulaSteps] = {}
    for method in filter(adds_ends, METHODS):
        for name, form, closing in forms[method]:
            words = tokenizer() if closing is None else tokenizer(closing)
            runs[f"{method} {name}"] = run = steps(method, preferences(method, form), words)
            if form != "rendered":
                assert_right(run)
    return several_runs(runs, absent("each completion has one end of sequence, or is a text"))
