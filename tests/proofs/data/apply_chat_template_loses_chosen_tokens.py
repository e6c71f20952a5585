"""Train two steps of two micro-batches, and evaluate, with ORPO, CPO and DPO, which from 0.29.0 on is given images.

The chat template's generation prompt begins each answer with two tokens. Answers have both, one or none of them, so a
chosen one loses up to two. Losses and gradients are compared with the formulas of the papers, on tokens that are made
without a chat template. With 1.9.0 the first steps of ORPO and CPO are compared.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny import vision
from tiny.dpo_steps import MicroBatch, assert_right, sigmoid_loss
from tiny.grpo_steps import judged_steps, several_runs

ID = "apply-chat-template-loses-chosen-tokens"
OVERLAYS = ()
PARITY = True
DATA = True
EQUIVALENT = {
    "applied twice": "what is rendered once more has the whole answer",
    'keep_the_whole_answer: `if result is example or not {"prompt", "chosen"} <= result.keys():` -> '
    '`if result is example or not {"prompt", "chosen"} < result.keys():`': "a pair has a rejected answer, too",
    "keep_the_whole_answer: `result is example or not {'prompt', 'chosen'} <= result.keys()` -> "
    "`not {'prompt', 'chosen'} <= result.keys()`": "texts that are rendered once more are the same",
}
VARIANTS = "the data are rendered before the model is compiled, and whatever part of it is trained"

BETA, EOS = 0.5, 1
TEMPLATE = (
    "{% for message in messages %}{{ 'w58 ' if message['role'] == 'user' else 'w59 ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image> ' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'w59 <unk> w57 ' }}{% endif %}"
)
WITHOUT_BEGINNING = TEMPLATE.replace("<unk> w57 ", "")


@dataclass(frozen=True)
class Row:
    """A pair, as its texts are right, and the chosen answer as it is wrong. ``begins`` is what the prompt has of it."""

    question: str
    begins: str
    chosen: str
    rejected: str
    wrong: str
    image: tuple[float, float, float]


def pairs(*kinds: str) -> list[Row]:
    """Return eight pairs. ``kinds`` is what the prompt has of the generation prompt, and what it should leave."""
    rows = []
    for index in range(8):
        question = " ".join(f"w{10 + 3 * index + place}" for place in range(1 + index % 3))
        chosen = " ".join(f"w{(7 * index + 3 * place) % 10}" for place in range(2 + index % 2))
        rejected = " ".join(f"w{(5 * index + 2 * place) % 10}" for place in range(3 + index % 3))
        begins, left = {
            "both": ("", "<unk> w57 "),
            "one": ("<unk> ", "w57 "),
            "none": ("<unk> w57 ", ""),
        }[kinds[index % len(kinds)]]
        # Without a beginning of its own, the rejected answer goes on otherwise than the template.
        rejected = f"<unk> {rejected}" if left == "w57 " else rejected
        image = (0.1 * index, 0.5, -0.3)
        rows.append(Row(question, begins, f"{left}{chosen}", rejected, chosen, image))
    return rows


def dataset(rows: list[Row], form: str) -> Any:
    """Return rows of messages, of messages with images, or of texts."""
    from datasets import Dataset

    made = []
    for row in rows:
        answers = {"chosen": row.begins + row.chosen, "rejected": row.begins + row.rejected}
        columns: dict[str, Any] = {"images": [list(row.image)]} if form == "images" else {}
        if form == "texts":
            columns |= {"prompt": row.question, **{name: f" {answer}" for name, answer in answers.items()}}
        else:
            columns["prompt"] = [{"role": "user", "content": row.question}]
            columns |= {name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()}
        made.append(columns)
    return Dataset.from_list(made)


def tokens(text: str, *, ends: bool = False) -> list[int]:
    words = vision.processor().tokenizer
    return words(text.replace("<image>", vision.EXPANDED))["input_ids"] + [EOS] * ends


class Formula:
    """The losses of a micro-batch. It has a row for each prompt of the batch, which is known by its first word."""

    def __init__(self, method: str, rows: list[Row], form: str) -> None:
        self.method, self.form = method, form
        self.by_word = {tokens(row.question)[0]: row for row in rows}

    def __call__(self, policy: Any, reference: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.loss(policy, reference, batch, name) for name in ("right", "wrong")}

    def loss(self, policy: Any, reference: Any, batch: Mapping[str, Any], name: str) -> Any:
        import torch

        ids, attention = (
            batch[f"chosen_{part}"] if f"chosen_{part}" in batch else batch[part].chunk(2)[0]
            for part in ("input_ids", "attention_mask")
        )
        prompts = batch.get("prompt_input_ids", ids).tolist()
        rows = [self.by_word[next(token for token in prompt if token in self.by_word)] for prompt in prompts]
        # Trainers of some releases put an end behind an answer.
        ends = EOS in ids[attention == 1]
        answers = [row.chosen if name == "right" else row.wrong for row in rows], [row.rejected for row in rows]
        chosen, rejected = (self.summed(policy, rows, side, ends=ends) for side in answers)
        if self.method == "CPO":
            # Equation 4 of the paper (arXiv:2401.08417).
            preference = torch.nn.functional.logsigmoid(BETA * (chosen.answers - rejected.answers)).mean()
            return -preference - chosen.answers.sum() / chosen.tokens.sum()
        if self.method == "ORPO":
            # Equation 6 of the paper (arXiv:2403.07691). TRL's cross-entropy is that of the prompt as well.
            means = [side.answers / side.tokens for side in (chosen, rejected)]
            odds = [mean - torch.log1p(-torch.exp(mean)) for mean in means]
            preference = torch.nn.functional.logsigmoid(odds[0] - odds[1]).mean()
            return -chosen.sequences.sum() / chosen.tokens_of_sequences.sum() - BETA * preference
        with torch.no_grad():
            of_reference = [self.summed(reference, rows, side, ends=ends).answers for side in answers]
        return sigmoid_loss((chosen.answers, rejected.answers), (of_reference[0], of_reference[1]))

    def summed(self, model: Any, rows: list[Row], answers: list[str], *, ends: bool) -> LogProbs:
        """Return the log-probs of these answers, one at a time."""
        import torch

        sums: list[Any] = []
        for row, answer in zip(rows, answers, strict=True):
            image = "<image> " if self.form == "images" else ""
            prompt = tokens(row.question if self.form == "texts" else f"w58 {image}{row.question} w59 {row.begins}")
            completion = tokens(answer, ends=ends)
            ids = torch.tensor([prompt + completion])
            pixels = torch.tensor([row.image])[:, :, None, None].expand(-1, 3, 4, 4)
            inputs = {"pixel_values": pixels} if image else {}
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0, :-1]
            log_probs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            sums.append((log_probs[-len(completion) :].sum(), len(completion), log_probs.sum(), len(log_probs)))
        return LogProbs(
            *(torch.stack([torch.as_tensor(value) for value in values]) for values in zip(*sums, strict=True))
        )


@dataclass
class LogProbs:
    """The sums over answers and over whole sequences, and how many tokens are in them."""

    answers: Any
    tokens: Any
    sequences: Any
    tokens_of_sequences: Any


def steps(method: str, rows: list[Row], form: str = "messages", template: str = TEMPLATE) -> tiny.FormulaSteps:
    """Train two steps and evaluate, and compute the formulas beside each micro-batch."""
    import torch
    from transformers import TrainerCallback

    run = tiny.FormulaSteps()
    own_class, config_class = tiny.classes(method)
    # The method that the evaluation calls too.
    name_of_method = "get_batch_loss_metrics" if hasattr(own_class, "get_batch_loss_metrics") else "compute_loss"
    formula = Formula(method, rows, form)

    def recorded(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batch = {name: value.clone() for name, value in inputs.items() if hasattr(value, "clone")}
        with torch.enable_grad():
            expected = formula(policy, reference, batch)
        if self.model.training:
            run.add(expected, trainable)
        result = getattr(super(Recorder, self), name_of_method)(model, inputs, *args, **kwargs)
        loss = float((result[0] if isinstance(result, tuple) else result).detach())
        values = {name: float(value.detach()) for name, value in expected.items()}
        run.micro_batches.append(MicroBatch(batch, self.model.training, loss, values, 1))
        return result

    Recorder = type("Recorder", (own_class,), {name_of_method: recorded})

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                for number, parameter in enumerate(trainable.values()):
                    index = torch.arange(parameter.numel()).reshape(parameter.shape)
                    parameter.add_(0.1 * torch.cos(number + index))
            # transformers calls back before an optimizer step from 4.46 on only.
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *_: run.end_step(trainable))

    defaults = {"max_steps": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5, "beta": BETA}
    # The arguments go into the fingerprints of the data.
    defaults |= dict.fromkeys(("output_dir", "logging_dir"), f"{tempfile.gettempdir()}/pairs")
    defaults |= {"max_length": 32, "max_prompt_length": 16}
    data = dataset(rows, form)
    with tempfile.TemporaryDirectory() as folder:
        make = vision.llava if form == "images" else lambda *, seed: tiny.llama(folder, seed=seed)
        policy, reference = make(seed=0), make(seed=1)
        # What sees the image is not trained.
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_("vision" not in name and "projector" not in name)
        trainable = {name: value for name, value in policy.named_parameters() if value.requires_grad}
        run.trainer = tiny.trainer(
            Recorder,
            model=policy,
            args=tiny.config(config_class, **defaults),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            tokenizer=vision.processor(template) if form == "images" else tiny.chat_tokenizer(template),
            callbacks=[Steps()],
            **({"ref_model": make(seed=1)} if method == "DPO" else {}),
        )
        run.measure_factor(run.trainer)
        run.trainer.train()
        run.trainer.evaluate()
    return run


def forms() -> dict[str, str]:
    """Return the trainers that use the function, and what they are given."""
    from trl.trainer import dpo_trainer

    form_of_dpo = "messages" if hasattr(dpo_trainer, "maybe_apply_chat_template") else "images"
    return {"ORPO": "messages", "CPO": "messages", "DPO": form_of_dpo}


def train() -> tiny.TrainingResult:
    from trl import data_utils

    if not hasattr(data_utils, "takewhile"):
        return tiny.TrainingResult(absent("a prompt that the whole text does not begin with is refused"))
    runs = {method: steps(method, pairs("both", "one", "none"), form) for method, form in forms().items()}
    outcomes = [judged_steps(run) for run in runs.values()]
    assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
    # ORPO and CPO have themselves, with their weights, in the fingerprints of what they make of these rows.
    tiny.state.fingerprints[:] = [rendered(method)._fingerprint for method in ("ORPO", "CPO")]
    # DPO is given something else in other releases, and transformers multiplies gradients by other factors.
    firsts = {method: runs[method].first_step for method in ("ORPO", "CPO")}
    gradients = {f"{method} {name}": value for method, step in firsts.items() for name, value in step.gradients.items()}
    return tiny.TrainingResult(outcomes[0], sum(step.loss for step in firsts.values()), gradients)


def rendered(method: str) -> Any:
    """Return the rows as the trainer renders them."""
    render = sys.modules[tiny.classes(method)[0].__module__].maybe_apply_chat_template
    _, name_of_tokenizer, *_ = inspect.signature(render).parameters
    data = dataset(pairs("both", "one", "none"), "messages")
    return data.map(render, fn_kwargs={name_of_tokenizer: tiny.chat_tokenizer(TEMPLATE)})


def unaffected() -> tiny.TrainingResult:
    """Train on answers that all begin as the template does, with a template that begins none, and on texts."""
    runs = {}
    with tiny.counted(ID) as counts:
        for method, form in forms().items():
            runs[f"{method} none"] = steps(method, pairs("none"), form)
            runs[f"{method} no beginning"] = steps(method, pairs("both"), form, WITHOUT_BEGINNING)
            if form != "images":
                runs[f"{method} texts"] = steps(method, pairs("both"), "texts")
        for run in runs.values():
            assert_right(run)
        assert not counts().acted, "the wrapper acts"
    return several_runs(runs, absent("nothing of the chosen answers is lost"))
