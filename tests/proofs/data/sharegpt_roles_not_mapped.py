"""Train two steps of two micro-batches with the real SFTTrainer on conversations of human and gpt, and evaluate.

One chat template writes the length of the role before each turn, the other has a system prompt and leaves unknown roles
out. Losses and gradients are compared with those of the tokens that each writes for user and assistant (right), and for
human and gpt (wrong). The tokens are made without TRL.
"""

from __future__ import annotations

import inspect
import tempfile
from typing import Any

from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny.dpo_steps import MicroBatch, assert_right
from tiny.grpo_steps import judged_steps, several_runs

OVERLAYS = ()
PARITY = False
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

EOS = 1
NAMES = {"human": "user", "gpt": "assistant"}
HEADERS = (
    "{% for message in messages %}{{ 'w' ~ (message.role | length) ~ ' ' ~ message.content ~ ' <eos> ' }}{% endfor %}"
)
KNOWN = (
    "w57 w56 w55 <eos> {% for message in messages %}{% if message.role in ['user', 'assistant'] %}"
    "{{ 'w' ~ (message.role | length) ~ ' ' ~ message.content ~ ' <eos> ' }}{% endif %}{% endfor %}"
)
OF_SHAREGPT = HEADERS + "{# 'human' and 'gpt' are its roles #}"


def conversations() -> list[list[tuple[str, str]]]:
    """Return eight conversations of two to four turns of one to three words."""
    return [
        [
            (
                ("human", "gpt")[turn % 2],
                " ".join(f"w{(7 * row + 5 * turn + 3 * word) % 60}" for word in range(1 + (row + turn) % 3)),
            )
            for turn in range(2 + row % 3)
        ]
        for row in range(8)
    ]


def rows_of(names: dict[str, str], column: str = "conversations") -> list[dict[str, Any]]:
    return [
        {column: [{"from": names.get(role, role), "value": content} for role, content in turns]}
        for turns in conversations()
    ]


def tokens(template: str, names: dict[str, str]) -> list[list[int]]:
    """Return the tokens of each conversation: those of the template, and an end if there is none."""
    words = tiny.tokenizer()
    result = []
    for turns in conversations():
        named = [(names.get(role, role), content) for role, content in turns]
        kept = named if template != KNOWN else [turn for turn in named if turn[0] in NAMES.values()]
        text = " ".join(f"w{len(role)} {content} <eos>" for role, content in kept)
        result.append(words(text if template != KNOWN else f"w57 w56 w55 <eos> {text}")["input_ids"])
    return result


def sft_steps(
    template: str, data: list[dict[str, Any]], ids: dict[str, list[list[int]]], **arguments: Any
) -> tiny.FormulaSteps:
    """Train two steps of four rows, and evaluate three rows. ``ids`` has the tokens of all rows, for each formula."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    run = tiny.FormulaSteps()

    class Recorder(SFTTrainer):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            training = self.model.training
            begin = 2 * sum(micro_batch.is_training == training for micro_batch in run.micro_batches)
            count = kwargs.get("num_items_in_batch")
            with torch.enable_grad():
                expected = {
                    name: loss_of(policy, rows[begin : begin + len(inputs["input_ids"])], count)
                    for name, rows in ids.items()
                }
            if training:
                run.add(expected, trainable)
            result = super().compute_loss(model, inputs, *args, **kwargs)
            loss = float((result[0] if isinstance(result, tuple) else result).detach())
            values = {name: float(value.detach()) for name, value in expected.items()}
            run.micro_batches.append(MicroBatch({}, training, loss, values, 0))
            return result

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *_: run.end_step(trainable))

    settings = {"max_steps": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5}
    # The arguments go into the fingerprints of the data.
    settings |= dict.fromkeys(("output_dir", "logging_dir"), f"{tempfile.gettempdir()}/sharegpt")
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        run.trainer = tiny.trainer(
            Recorder,
            model=policy,
            args=tiny.config(SFTConfig, max_length=32, max_seq_length=32, **settings),
            train_dataset=Dataset.from_list(data),
            eval_dataset=Dataset.from_list(data[:3]),
            tokenizer=tiny.chat_tokenizer(template),
            callbacks=[Steps()],
            **arguments,
        )
        trainable = dict(policy.named_parameters())
        run.measure_factor(run.trainer)
        run.trainer.train()
        run.trainer.evaluate()
    return run


def loss_of(model: Any, rows: list[list[int]], count: Any) -> Any:
    """Return the mean of the tokens' cross-entropies, or their sum divided by ``count``, as transformers asks for."""
    import torch

    losses = []
    for ids in rows:
        log_probs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
        losses.append(-log_probs.gather(1, torch.tensor(ids[1:], dtype=torch.long)[:, None])[:, 0])
    together = torch.cat(losses)
    return together.sum() / (len(together) if count is None else count)


def train() -> tiny.TrainingResult:
    from trl.trainer import sft_trainer

    if not hasattr(sft_trainer, "maybe_convert_to_chatml"):
        return tiny.TrainingResult(absent("this release knows no conversations of 'from' and 'value'"))
    outcomes = {}
    runs = {}
    for name, template in {"headers": HEADERS, "known": KNOWN}.items():
        ids = {"right": tokens(template, NAMES), "wrong": tokens(template, {})}
        runs[name] = sft_steps(template, rows_of({}), ids)
        outcomes[name] = judged_steps(runs[name])
    # From 1.0 on some releases have the recorder, with its weights, in their fingerprints. Those below are compared.
    tiny.state.fingerprints.clear()
    (verdict,) = {outcome.verdict for outcome in outcomes.values()}
    expected = tokens(HEADERS, NAMES if verdict is Verdict.FIXED else {})
    words = tiny.chat_tokenizer(HEADERS)
    # 0.15 takes no stream without column names.
    if "first_example" in inspect.unwrap(sft_trainer.SFTTrainer._prepare_dataset).__code__.co_varnames:
        streamed = tiny.sft_step(rows_of({}), words=words, streaming=True)
        assert [row["input_ids"] for row in streamed.trainer.train_dataset] == expected
    evaluated = tiny.sft_step(rows_of({}), words=words, trainer_arguments={"eval_dataset": {"one": rows_of({})}})
    assert [row["input_ids"] for row in evaluated.trainer.eval_dataset["one"]] == expected
    return several_runs(runs, outcomes["headers"])


def unaffected() -> tiny.TrainingResult:
    """Train on the roles of TRL, and with a chat template that is made for those of ShareGPT."""
    runs = {
        "roles of TRL": sft_steps(HEADERS, rows_of(NAMES), {"right": tokens(HEADERS, NAMES)}),
        "made for it": sft_steps(OF_SHAREGPT, rows_of({}), {"right": tokens(HEADERS, {})}),
    }
    for run in runs.values():
        assert_right(run)
    return several_runs(runs, absent("the chat template knows the roles"))
