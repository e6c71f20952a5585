"""Train two steps of two micro-batches with CPO, CPO's SimPO and ORPO on pairs that are too long, and evaluate.

Losses and gradients are compared with those of the papers' formulas on rows cut at ``max_length`` (right), and on rows
whose responses are cut at ``max_length`` minus the longer response (wrong). The rows are read in order, and their
tokens are made without TRL. Then runs on pairs that are cut to nothing: the gradient is finite or it is not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny.dpo_steps import MicroBatch, assert_right
from tiny.grpo_steps import judged_steps, several_runs

ID = "cpo-orpo-truncation-by-longer-response"
OVERLAYS = ()
PARITY = True
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

BETA, GAMMA, BATCH, LIMIT, EOS = 0.5, 0.25, 2, 12, 1
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "CPO": ("CPO", {"loss_type": "sigmoid"}),
    "SimPO": ("CPO", {"loss_type": "simpo", "simpo_gamma": GAMMA}),
    "ORPO": ("ORPO", {}),
}


def pairs() -> list[dict[str, str]]:
    """Return eight pairs. Every fourth has a long prompt and short responses."""
    rows = []
    for index in range(8):
        long = index % 4 == 3
        prompt, chosen, rejected = (10, 3, 1) if long else (3 + index % 3, 4 + 5 * index % 6, 3 + 7 * index % 6)
        rows.append(pair(index, prompt, chosen, rejected))
    return rows


def pair(index: int, prompt: int, chosen: int, rejected: int) -> dict[str, str]:
    """Return a pair with so many words."""
    return {
        "prompt": " ".join(f"w{(11 * index + place) % 50}" for place in range(prompt)),
        "chosen": "".join(f" w{(7 * index + 3 * place) % 60}" for place in range(chosen)),
        "rejected": "".join(f" w{(5 * index + 13 * place + 1) % 60}" for place in range(rejected)),
    }


def ids_of(row: Mapping[str, str], side: str) -> tuple[list[int], list[int]]:
    prompt, response = (tiny.tokenizer()(row[name])["input_ids"] for name in ("prompt", side))
    return prompt, [*response, EOS]


def cut_row(row: Mapping[str, str], side: str) -> tuple[list[int], list[int]]:
    prompt, response = ids_of(row, side)
    return prompt, response[: LIMIT - len(prompt)]


def cut_by_longer_response(row: Mapping[str, str], side: str) -> tuple[list[int], list[int]]:
    prompt, response = ids_of(row, side)
    longer = max(len(ids_of(row, name)[1]) for name in ("chosen", "rejected"))
    return prompt, response[: LIMIT - longer] if len(prompt) + longer > LIMIT else response


Cut = Callable[[Mapping[str, str], str], tuple[list[int], list[int]]]
CUTS: Mapping[str, Cut] = {"right": cut_row, "wrong": cut_by_longer_response}


def log_probs(model: Any, prompt: list[int], response: list[int]) -> Any:
    """Return the log-probs of all tokens but the first."""
    import torch

    tokens = torch.tensor([prompt + response])
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


def loss_of(kind: str, model: Any, batch: list[dict[str, str]], cut: Cut) -> Any:
    """Return the loss of CPO (arXiv:2401.08417), SimPO (arXiv:2405.14734) or ORPO (arXiv:2403.07691)."""
    import torch

    sides, nll = [], []
    for row in batch:
        means = []
        for side in ("chosen", "rejected"):
            prompt, response = cut(row, side)
            all_log_probs = log_probs(model, prompt, response)
            of_response = all_log_probs[len(prompt) - 1 :]
            means.append(of_response.sum() if kind == "CPO" else of_response.mean())
            if side == "chosen":
                nll.append(-(all_log_probs if kind == "ORPO" else of_response))
        sides.append(torch.stack(means))
    chosen, rejected = torch.stack(sides).T
    if kind == "ORPO":
        odds = [logp - torch.log1p(-logp.exp()) for logp in (chosen, rejected)]
        preference = -BETA * torch.nn.functional.logsigmoid(odds[0] - odds[1])
    else:
        margin = BETA * (chosen - rejected) - (GAMMA if kind == "SimPO" else 0.0)
        preference = -torch.nn.functional.logsigmoid(margin)
    return preference.mean() + torch.cat(nll).mean()


def steps(kind: str, rows: list[dict[str, str]], cuts: Mapping[str, Cut], **settings: Any) -> tiny.FormulaSteps:
    """Train two steps and evaluate. Beside each micro-batch, compute the loss of its rows by each of ``cuts``."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback

    method, of_kind = KINDS[kind]
    trainer_class, config_class = tiny.classes(method)
    run = tiny.FormulaSteps()
    given = {True: rows, False: rows[:4]}

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def get_batch_loss_metrics(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            training = self.model.training
            number = sum(micro_batch.is_training == training for micro_batch in run.micro_batches)
            begin = number * BATCH % len(given[training])
            batch = given[training][begin : begin + BATCH]
            with torch.enable_grad():
                expected = {name: loss_of(kind, policy, batch, cut) for name, cut in cuts.items()}
            if training:
                run.add(expected, trainable)
            result = super().get_batch_loss_metrics(model, inputs, *args, **kwargs)
            values = {name: float(value.detach()) for name, value in expected.items()}
            run.micro_batches.append(MicroBatch({}, training, float(result[0].detach()), values, 0))
            return result

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *_: run.end_step(trainable))

    defaults = {"max_steps": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5, "beta": BETA}
    defaults |= {"max_length": LIMIT, "remove_unused_columns": False, **of_kind, **folders()}
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        trainable = dict(policy.named_parameters())
        run.trainer = tiny.trainer(
            Recorder,
            model=policy,
            args=tiny.config(config_class, **{**defaults, **settings}),
            train_dataset=Dataset.from_list(given[True]),
            eval_dataset=Dataset.from_list(given[False]),
            tokenizer=tiny.tokenizer(),
            callbacks=[Steps()],
        )
        run.measure_factor(run.trainer)
        run.trainer.train()
        run.trainer.evaluate()
    return run


def folders() -> dict[str, Any]:
    # The arguments go into the fingerprints of the data.
    return dict.fromkeys(("output_dir", "logging_dir"), f"{tempfile.gettempdir()}/cut")


def train() -> tiny.TrainingResult:
    from datasets import Dataset

    if "max_prompt_length" in tiny.classes("CPO")[1].__dataclass_fields__:
        return tiny.TrainingResult(absent("prompts are cut at max_prompt_length"))
    runs = {kind: steps(kind, pairs(), CUTS) for kind in KINDS}
    outcomes = [judged_steps(run) for run in runs.values()]
    assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
    if tiny.acts(ID, f"{_class(runs['CPO'].trainer)}.__init__", runs["CPO"].trainer) is not None:
        check_other_rows()
    elif outcomes[0].verdict is Verdict.REPRODUCED:
        check_cut_to_nothing()
    # The trainer, with its weights, is in the fingerprints of what it makes of these rows.
    prepared = [Dataset.from_list(list(run.trainer.train_dataset)) for run in runs.values()]
    tiny.state.fingerprints[:] = [rows_of_run._fingerprint for rows_of_run in prepared]
    firsts = {kind: run.first_step for kind, run in runs.items()}
    gradients = {f"{kind} {name}": value for kind, step in firsts.items() for name, value in step.gradients.items()}
    return tiny.TrainingResult(outcomes[0], firsts["CPO"].loss, gradients)


def _class(trainer: Any) -> str:
    base = next(base for base in type(trainer).__mro__ if "tokenize_row" in vars(base))
    return f"{base.__module__}:{base.__name__}"


LONG_RESPONSE = pair(0, 3, 11, 2)
LONG_PROMPTS = [pair(1, LIMIT, 2, 3), pair(2, LIMIT + 4, 1, 2)]


def trained_on(method: str, rows: list[dict[str, str]], **settings: Any) -> Any:
    """Train one step on a real trainer, with these rows also in two evaluation sets, and return it."""
    from datasets import Dataset, DatasetDict

    trainer_class, config_class = tiny.classes(method)
    data = Dataset.from_list(rows)
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.trainer(
            tiny.stepwise(trainer_class),
            model=tiny.llama(folder, seed=0),
            args=tiny.config(config_class, max_length=LIMIT, remove_unused_columns=False, **folders(), **settings),
            train_dataset=data,
            eval_dataset=DatasetDict({"first": data, "second": data}),
            tokenizer=tiny.tokenizer(),
        )
        trainer.train()
    return trainer


def is_finite(trainer: Any) -> bool:
    return all(bool(value.isfinite().all()) for value in trainer.steps[0].gradients.values())


def check_cut_to_nothing() -> None:
    """Check that the gradient of a pair whose longer response fills ``max_length`` is NaN without the patch."""
    assert not is_finite(trained_on("ORPO", [LONG_RESPONSE]))
    assert is_finite(trained_on("CPO", [LONG_RESPONSE], loss_type="sigmoid", cpo_alpha=0.0))


def check_other_rows() -> None:
    """Check that rows without room for a response are dropped, others trained on, and one warning said of each set."""
    for method, settings in (("ORPO", {}), ("CPO", {"loss_type": "simpo"}), ("ORPO", {"dataset_num_proc": 2})):
        rows = [LONG_RESPONSE, *LONG_PROMPTS, pair(3, LIMIT - 1, 2, 2)]
        trainer, warnings = tiny.warnings_of(lambda m=method, r=rows, s=settings: trained_on(m, r, **s))
        expected = [
            [prompt + response for prompt, response in (cut_row(row, side) for side in ("chosen", "rejected"))]
            for row in (rows[0], rows[3])
        ]
        for dataset in (trainer.train_dataset, trainer.eval_dataset["first"], trainer.eval_dataset["second"]):
            prepared = [[row["chosen_input_ids"], row["rejected_input_ids"]] for row in dataset]
            assert prepared == expected, f"prepared are {prepared}, and not {expected}"
            assert all(len(row["chosen_attention_mask"]) == len(row["chosen_labels"]) == LIMIT for row in dataset)
        dropped = [message for message in warnings if "2 of 4 rows are dropped" in message]
        assert len(dropped) == 3, warnings
        assert is_finite(trainer)
        assert trainer.max_length == LIMIT


def unaffected() -> tiny.TrainingResult:
    """Train on pairs that fit, to the last token, and on those of a long ``max_length``."""
    short = [pair(index, 3 + index % 3, 8 - index % 3, 2 + index % 4) for index in range(8)]
    runs = {f"{kind} fit": steps(kind, short, {"right": cut_row}) for kind in KINDS}
    runs["long"] = steps("ORPO", pairs(), {"right": ids_of}, max_length=64)
    for name, run in runs.items():
        assert_right(run)
        for attribute in ("tokenize_row", "__init__"):
            target = f"{_class(run.trainer)}.{attribute}"
            assert not tiny.acts(ID, target, run.trainer), f"the wrapper acts: {name}, {attribute}"
    return several_runs(runs, absent("each pair fits into max_length"))
