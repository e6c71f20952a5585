"""Train two steps of two micro-batches, and evaluate, with DPO and KTO on rows of which some prompts fill max_length.

Losses and gradients are compared with those of the papers' formulas on the rows whose prompt leaves room for an answer
(right) and on all rows (wrong), each cut at ``max_length``. The rows are read in order. Their tokens are made without
TRL.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny.dpo_steps import MicroBatch, assert_right
from tiny.grpo_steps import judged_steps, several_runs

ID = "dpo-fully-truncated-completions-kept"
OVERLAYS = ()
PARITY = True
DATA = True
EQUIVALENT = {"applied twice": "the outer wrapper finds no row to drop, and returns what it is given"}
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

BETA, BATCH, LIMIT, EOS = 0.5, 2, 6, 1


def rows(*, long: bool = True) -> list[dict[str, Any]]:
    """Return twelve pairs. Of every third the prompt has six words or seven, and of others five or fewer."""
    made = []
    for index in range(12):
        words = 6 + index % 2 if long and index % 3 == 1 else 2 + index % 4
        made.append(
            {
                "prompt": " ".join(f"w{(11 * index + place) % 50}" for place in range(words)),
                "chosen": " " + " ".join(f"w{(7 * index + 3 * place) % 50}" for place in range(2 + index % 3)),
                "rejected": " " + " ".join(f"w{(5 * index + 2 * place) % 50}" for place in range(3 + index % 2)),
            }
        )
    return made


def with_room(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in pairs if len(row["prompt"].split()) < LIMIT]


def dataset(method: str, pairs: list[dict[str, Any]], *, streaming: bool = False) -> Any:
    from datasets import Dataset

    if method == "KTO":
        pairs = [{**row, "label": is_desirable(row)} for row in pairs]
        pairs = [{name: row[name] for name in ("prompt", "label")} | {"completion": row["chosen"]} for row in pairs]
    data = Dataset.from_list(pairs)
    return data.to_iterable_dataset() if streaming else data


def is_desirable(row: Mapping[str, Any]) -> bool:
    return len(row["chosen"].split()) != 3


def ids_of(text: str, *, ends: bool = False) -> list[int]:
    return tiny.tokenizer()(text)["input_ids"] + [EOS] * ends


def log_prob(model: Any, prompt: str, answer: str, kept: slice) -> Any:
    """Return the log-prob of what is left of the answer in the tokens ``kept``; 0 if that is nothing."""
    import torch

    prompt_ids = ids_of(prompt)
    ids = [*prompt_ids, *ids_of(answer, ends=True)]
    is_answer = torch.tensor([index >= len(prompt_ids) for index in range(len(ids))][kept])
    tokens = torch.tensor([ids[kept]])
    log_probs = model(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    return (log_probs.gather(1, tokens[0, 1:, None])[:, 0] * is_answer[1:]).sum()


def dpo_loss(policy: Any, reference: Any, batch: list[dict[str, Any]], kept: slice) -> Any:
    """Return equation 7 of the paper (arXiv:2305.18290)."""
    import torch

    losses = []
    for row in batch:
        ratios = [log_ratio(policy, reference, row["prompt"], row[side], kept) for side in ("chosen", "rejected")]
        losses.append(-torch.nn.functional.logsigmoid(BETA * (ratios[0] - ratios[1])))
    return torch.stack(losses).mean()


def kto_loss(policy: Any, reference: Any, batch: list[dict[str, Any]], kept: slice) -> Any:
    """Equations 7 and 8 of the paper (arXiv:2402.01306): the KL is that of each prompt with the completion before."""
    import torch

    answers = [row["chosen"] for row in batch]
    mismatched = zip(batch, [answers[-1], *answers[:-1]], strict=True)
    kl = torch.stack([log_ratio(policy, reference, row["prompt"], answer, kept) for row, answer in mismatched])
    losses = []
    for row in batch:
        sign = 1 if is_desirable(row) else -1
        reward = log_ratio(policy, reference, row["prompt"], row["chosen"], kept)
        losses.append(1 - torch.sigmoid(BETA * sign * (reward - kl.mean().clamp(min=0).detach())))
    return torch.stack(losses).mean()


def log_ratio(policy: Any, reference: Any, prompt: str, answer: str, kept: slice) -> Any:
    import torch

    with torch.no_grad():
        of_reference = log_prob(reference, prompt, answer, kept)
    return log_prob(policy, prompt, answer, kept) - of_reference


LOSSES: dict[str, Callable[..., Any]] = {"DPO": dpo_loss, "KTO": kto_loss}


def methods() -> dict[str, Any]:
    """Return the trainers whose answers have no room of their own, with their configs."""
    found = {method: tiny.classes(method) for method in LOSSES}
    return {
        method: classes
        for method, classes in found.items()
        if hasattr(classes[0], "_prepare_dataset") and not hasattr(classes[0], "tokenize_row")
    }


def steps(
    method: str,
    pairs: list[dict[str, Any]],
    orders: Mapping[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]],
    kept: slice = slice(LIMIT),
    **settings: Any,
) -> tiny.FormulaSteps:
    """Train two steps and evaluate. ``orders`` gives the rows that each formula has of those that are given."""
    import torch
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback

    trainer_class, config_class = methods()[method]
    run = tiny.FormulaSteps()
    given = {True: pairs, False: pairs[:6]}
    collator = settings.pop("data_collator", None)

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            training = self.model.training
            number = sum(micro_batch.is_training == training for micro_batch in run.micro_batches)
            expected = {}
            for name, order in orders.items():
                read = order(given[training])
                begin = number * BATCH % len(read)
                with torch.enable_grad():
                    expected[name] = LOSSES[method](policy, reference, read[begin : begin + BATCH], kept)
            if training:
                run.add(expected, trainable)
            result = super().compute_loss(model, inputs, *args, **kwargs)
            loss = float((result[0] if isinstance(result, tuple) else result).detach())
            values = {name: float(value.detach()) for name, value in expected.items()}
            run.micro_batches.append(MicroBatch({}, training, loss, values, 0))
            return result

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                for number, parameter in enumerate(trainable.values()):
                    index = torch.arange(parameter.numel()).reshape(parameter.shape)
                    parameter.add_(0.1 * torch.cos(number + index))
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *_: run.end_step(trainable))

    defaults = {"max_steps": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5, "beta": BETA}
    defaults |= {"max_length": LIMIT, "remove_unused_columns": False, **folders()}
    with tempfile.TemporaryDirectory() as folder:
        policy, reference = tiny.llama(folder, seed=0), tiny.llama(folder, seed=1)
        run.trainer = tiny.trainer(
            Recorder,
            model=policy,
            ref_model=tiny.llama(folder, seed=1),
            args=tiny.config(config_class, **{**defaults, **settings}),
            data_collator=collator,
            train_dataset=dataset(method, pairs),
            eval_dataset=dataset(method, given[False]),
            tokenizer=tiny.tokenizer(),
            callbacks=[Steps()],
        )
        trainable = dict(policy.named_parameters())
        run.measure_factor(run.trainer)
        run.trainer.train()
        run.trainer.evaluate()
    return run


def folders() -> dict[str, Any]:
    # The arguments go into the fingerprints of the data.
    return dict.fromkeys(("output_dir", "logging_dir"), f"{tempfile.gettempdir()}/truncated")


def train() -> tiny.TrainingResult:
    from datasets import Dataset

    kinds = {"right": with_room, "wrong": list}
    if "DPO" not in methods():
        return tiny.TrainingResult(absent("prompts are cut at max_prompt_length"))
    runs = {method: steps(method, rows(), kinds) for method in methods()}
    outcomes = [judged_steps(run) for run in runs.values()]
    assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
    if outcomes[0].verdict is Verdict.FIXED:
        for method in runs:
            check_other_data(method)
    # Some releases have the trainer, with its weights, in the fingerprints of what it makes of these rows.
    prepared = [Dataset.from_list(list(run.trainer.train_dataset)) for run in runs.values()]
    tiny.state.fingerprints[:] = [rows_of_run._fingerprint for rows_of_run in prepared]
    # Transformers multiplies gradients by other factors, and KTO's steps are compared where it has this bug.
    firsts = {method: run.first_step for method, run in runs.items()}
    gradients = {f"{method} {name}": value for method, step in firsts.items() for name, value in step.gradients.items()}
    return tiny.TrainingResult(outcomes[0], firsts["DPO"].loss, gradients)


def check_other_data(method: str) -> None:
    """Check several datasets, worker processes, a stream, and a dataset that is given to evaluate()."""
    trainer_class, config_class = methods()[method]
    expected = [ids_of(row["prompt"]) for row in with_room(rows())]
    with tempfile.TemporaryDirectory() as folder:
        for options, streaming in (({"dataset_num_proc": 2}, False), ({"max_steps": 1}, True)):
            data = dataset(method, rows(), streaming=streaming)
            trainer = tiny.trainer(
                trainer_class,
                model=tiny.llama(folder, seed=0),
                ref_model=tiny.llama(folder, seed=1),
                args=tiny.config(config_class, max_length=LIMIT, remove_unused_columns=False, **folders(), **options),
                train_dataset=data,
                eval_dataset={"first": data, "second": data},
                tokenizer=tiny.tokenizer(),
            )
            for prepared in (trainer.train_dataset, *trainer.eval_dataset.values()):
                prompts = [row["prompt_ids"] for row in prepared]
                assert prompts == expected, f"prepared are {prompts}, and not {expected}"


def own_collator(method: str) -> Any:
    """Return TRL's collator without a limit, as one of the user's that cuts nothing."""
    bases = methods()[method][0].__mro__
    module = sys.modules[next(base.__module__ for base in bases if "_prepare_dataset" in vars(base))]
    name = {"DPO": "DataCollatorForPreference", "KTO": "DataCollatorForUnpairedPreference"}[method]
    return getattr(module, name)(pad_token_id=0)


def unaffected() -> tiny.TrainingResult:
    """Train on short prompts, without a limit, with the end of sequences, and with a collator that cuts nothing."""
    runs = {}
    everything = {"right": list}
    for method, (trainer_class, config_class) in methods().items():
        runs[f"{method} short"] = steps(method, rows(long=False), everything)
        runs[f"{method} no limit"] = steps(method, rows(), everything, slice(None), max_length=None)
        if "truncation_mode" in config_class.__dataclass_fields__:
            end = {"truncation_mode": "keep_end"}
            runs[f"{method} end"] = steps(method, rows(), everything, slice(-LIMIT, None), **end)
        # DPO of 0.29 cuts what any collator returns.
        if not hasattr(trainer_class, "_truncate_inputs"):
            collator = own_collator(method)
            runs[f"{method} collator"] = steps(method, rows(), everything, slice(None), data_collator=collator)
    for name, run in runs.items():
        assert_right(run)
        base = next(base for base in type(run.trainer).__mro__ if "_prepare_dataset" in vars(base))
        target = f"{base.__module__}:{base.__name__}._prepare_dataset"
        assert not tiny.acts(ID, target, run.trainer), f"the wrapper acts: {name}"
    return several_runs(runs, absent("each row has a token of its answers"))
