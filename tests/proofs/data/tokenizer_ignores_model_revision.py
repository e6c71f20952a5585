"""Train two steps of two micro-batches, and evaluate, with SFT on a model of a revision that has another tokenizer.

The model is loaded by its name, from a folder with the layout of a download: on its main branch and at its revision it
has other weights, and the words have other ids. Losses and gradients are compared with the cross-entropy of the ids of
the revision, and of those of the main branch. The other trainers that load a tokenizer are made, and not trained.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from packaging.version import Version

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny
from tiny import sft_steps
from tiny.steps import expected_gradients

ID, TARGET = "tokenizer-ignores-model-revision", "trl.trainer.sft_trainer:SFTTrainer.__init__"
OVERLAYS = ()
PARITY = ">=0.18.0"
DATA = True
EQUIVALENT = {
    "_which_are_names: `tokenizers += [None] * (len(rewards) - len(tokenizers))` -> "
    "`tokenizers += [None] * (len(rewards) + len(tokenizers))`": "what is too long is cut by zip",
    "_at_revision: `if next(turns, False):` -> `if next(turns, True):`": "nothing else is loaded",
    "_as_list: without `if value is None:`": "None in a list is no reward model, and no tokenizer",
}
VARIANTS = "the tokenizer is loaded before the model is compiled, and whatever part of it is trained"

POLICY, REWARD, REVISION = "org/policy", "org/reward", "v1"
BRANCHES = {"main": 0, REVISION: 1}
"""The branches of each model: by how many places its words are rotated, and the seed of its weights."""
TEXTS = [
    " ".join(f"w{(7 * index + 3 * place) % 56}" for place in range(3 + index % 4)) + " <eos>" for index in range(8)
]
OTHERS = ("GRPO", "RLOO", "DPO", "Reward", "KTO", "CPO", "ORPO", "BCO")


def words(rotated: int) -> Any:
    """Return a tokenizer with the words of ``tiny.tokenizer()``, whose ids are rotated by so many places."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>"]
    names = [*special, *(f"w{(index + rotated) % 60}" for index in range(60))]
    word_level = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=word_level, bos_token="<unk>", model_input_names=inputs, model_max_length=1024, **tokens
    )


@contextlib.contextmanager
def downloads() -> Iterator[None]:
    """Let the hub's client look for its downloads in ``folder_of_downloads``."""
    import huggingface_hub
    import transformers

    folder = folder_of_downloads()
    with contextlib.ExitStack() as stack:
        for module in (transformers.utils.hub, huggingface_hub.constants, huggingface_hub.file_download):
            for constant in ("TRANSFORMERS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
                if hasattr(module, constant):
                    stack.enter_context(mock.patch.object(module, constant, folder))
        yield


@functools.cache
def folder_of_downloads() -> str:
    """Return a folder with both branches of the models. It is a part of the fingerprint of what is tokenized."""
    folder = tempfile.mkdtemp()
    for name in (POLICY, REWARD):
        repository = Path(folder, f"models--{name.replace('/', '--')}")
        (repository / "refs").mkdir(parents=True)
        for branch, number in BRANCHES.items():
            commit = str(number) * 40
            (repository / "refs" / branch).write_text(commit)
            snapshot = repository / "snapshots" / commit
            words(number).save_pretrained(snapshot)
            model_of(number, with_a_score=name == REWARD).save_pretrained(snapshot)
    return folder


def model_of(number: int, *, with_a_score: bool = False) -> Any:
    """Return the model of a branch, or a reward model."""
    import torch
    from transformers import LlamaForSequenceClassification

    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=number)
    if not with_a_score:
        return model
    torch.manual_seed(0)
    model.config.num_labels = 1
    return LlamaForSequenceClassification(model.config)


def sft(
    model: Any = POLICY, *, revision: str | None = REVISION, by_its_old_name: bool = False, **arguments: Any
) -> Any:
    """Return an SFT trainer that has trained two steps and evaluated. ``arguments`` are those of the trainer."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class ByOldName(SFTTrainer):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, tokenizer=kwargs.pop("processing_class"), **kwargs)

    # 0.15 makes the config a part of the fingerprint of the dataset, so folders must not have new names each time.
    settings = {name: str(Path(tempfile.gettempdir(), "sft")) for name in ("output_dir", "logging_dir")}
    settings |= {"max_seq_length": 32, "max_length": 32, "dataset_text_field": "text"}
    options = None if revision is None else {"revision": revision}
    # ``trl.__version__`` is "unknown" in 0.22.0.
    if options is not None and Version(version("trl")) < Version("0.10"):
        options["torch_dtype"] = None  # 0.9.6 fails without it.
    dataset = Dataset.from_list([{"text": text} for text in TEXTS])
    trainer = tiny.trainer(
        tiny.stepwise(ByOldName if by_its_old_name else SFTTrainer),
        model=model,
        args=tiny.config(
            SFTConfig,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=2,
            optim="sgd",
            learning_rate=0.5,
            model_init_kwargs=options,
            **settings,
        ),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(2)),
        **arguments,
    )
    note_steps(trainer)
    trainer.train()
    trainer.evaluate()
    return trainer


def note_steps(trainer: Any) -> None:
    """Let the optimizer end a step of ``tiny.stepwise``: transformers before 4.46 calls no callback before it."""
    create = trainer.create_optimizer

    def create_and_hook(*args: Any) -> Any:
        create(*args)
        trainer.optimizer.register_step_pre_hook(end_step)
        return trainer.optimizer

    def end_step(*args: Any) -> None:
        trainer.steps[-1].gradients = tiny.gradients_of(trainer.model)
        trainer.is_new_step = True

    trainer.create_optimizer = create_and_hook


def ids_of(branch: str) -> Any:
    """Return what replaces the token ids of a text by those of this branch, whichever they were."""
    new = [words(BRANCHES[branch])(text)["input_ids"] for text in TEXTS]
    known = {
        tuple(words(number)(text)["input_ids"]): ids for number in (0, 1) for text, ids in zip(TEXTS, new, strict=True)
    }

    def changed(row: sft_steps.Row) -> sft_steps.Row:
        ids = known[tuple(row[0])]
        return ids, [-100 if label == -100 else token for token, label in zip(ids, row[1], strict=True)]

    return changed


def train() -> tiny.TrainingResult:
    kinds = {"right": ids_of(REVISION), "wrong": ids_of("main")}
    with downloads():
        trainer = sft()
        judged = sft_steps.judged_sft_steps if divides_by_the_step(trainer) else judged_by_micro_batch
        outcome = judged(trainer, model_of(1), kinds)
        ids = {name: tokenizer("w9 w3")["input_ids"] for name, tokenizer in other_tokenizers().items()}
    expected = words(1 if outcome.verdict is Verdict.FIXED else 0)("w9 w3")["input_ids"]
    assert all(value == expected for value in ids.values()), f"tokenizers of other trainers: {ids}, not {expected}"
    return tiny.result_of_runs({"sft": trainer}, outcome)


def divides_by_the_step(trainer: Any) -> bool:
    """Return whether a loss is divided by the tokens of the step. transformers before 4.46 does not count them."""
    return trainer.steps[0].micro_batches[0].keywords.get("num_items_in_batch") is not None


def judged_by_micro_batch(trainer: Any, model: Any, kinds: dict[str, Any]) -> Any:
    """Judge losses that are means over the tokens of their micro-batch, and gradients that are means of two."""
    outcomes = []
    for step in trainer.steps:
        assert len(step.micro_batches) == 2

        def mean(model: Any, micro_batch: Any, kind: str) -> Any:
            rows = [kinds[kind](row) for row in sft_steps.rows_of(micro_batch.inputs)]
            return sft_steps.cross_entropy(model, rows) / sft_steps.labels_in(rows)

        model.load_state_dict(step.weights)
        for micro_batch in step.micro_batches:
            losses = {kind: float(mean(model, micro_batch, kind)) for kind in kinds}
            outcomes.append(judge(micro_batch.loss, **losses))
        kind = "right" if outcomes[-1].verdict is Verdict.FIXED else "wrong"

        def loss_of_step(model: Any, step: Any = step, kind: str = kind, mean: Any = mean) -> Any:
            return sum(mean(model, micro_batch, kind) for micro_batch in step.micro_batches) / 2

        difference = step.difference(expected_gradients(model, step.weights, loss_of_step))
        assert difference < 1e-5, f"the gradients differ by {difference}"
    if len(trainer.steps) != 2 or len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"expected two steps of one kind: {outcomes}")
    return outcomes[0]


def other_tokenizers() -> dict[str, Any]:
    """Return the tokenizers that other trainers load, and those of their reward models."""
    tokenizers = {}
    for method in OTHERS:
        trainer_class, config_class = classes(method)
        if trainer_class is None:
            continue
        trainer = made(method, trainer_class, config_class)
        tokenizers[method] = trainer.processing_class
        if method in ("GRPO", "RLOO"):
            tokenizers[f"reward of {method}"] = trainer.reward_processing_classes[0]
    return tokenizers


def classes(method: str) -> tuple[Any, Any]:
    """Return a trainer that loads a tokenizer in this release, and its config, or None twice."""
    import trl

    of_trl = getattr(trl, f"{method}Trainer", None), getattr(trl, f"{method}Config", None)
    for trainer_class, config_class in (tiny.classes(method), of_trl):
        if trainer_class is not None and loads_a_tokenizer(trainer_class):
            return trainer_class, config_class
    return None, None


def loads_a_tokenizer(trainer_class: Any) -> bool:
    names = inspect.unwrap(trainer_class.__init__).__code__.co_names
    return bool({"AutoTokenizer", "AutoProcessor"} & set(names))


def made(method: str, trainer_class: Any, config_class: Any) -> Any:
    """Return a trainer of a method that has loaded its model by its name."""
    settings: dict[str, Any] = {"max_length": 32, "max_prompt_length": 16, "per_device_train_batch_size": 4}
    settings |= {"num_generations": 4, "beta": 0.1}
    data = tiny.labelled() if method in ("KTO", "BCO") else tiny.preferences()
    rewards: dict[str, Any] = {"reward_funcs": REWARD} if method in ("GRPO", "RLOO") else {}
    args = tiny.config(config_class, model_init_kwargs={"revision": REVISION}, **settings)
    return trainer_class(model=POLICY, args=args, train_dataset=data, **rewards)


def unaffected() -> tiny.TrainingResult:
    """Train with a tokenizer that is passed, by its old name too, without a revision, and a model that is passed."""

    with downloads():
        runs = {
            "a tokenizer": sft(tokenizer=words(7)),
            "no revision": sft(revision=None),
            "a model": sft(model_of(1), revision=None, tokenizer=words(7)),
        }
        if Version("0.12") <= Version(version("trl")) < Version("0.16"):
            runs["the old name"] = sft(tokenizer=words(7), by_its_old_name=True)
    for name, trainer in runs.items():
        if tiny.acts(ID, TARGET, trainer):
            raise AssertionError(f"the wrapper acts: {name}")
    return tiny.result_of_runs(runs, absent("the tokenizer is passed, or there is no revision"))
