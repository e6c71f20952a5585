"""The proof: one step of the real SFTTrainer with a tokenizer that ends each text by itself.

A prompt alone then ends with a token that it has not before its completion. What is right is the mean loss of all
tokens of the completions, by the model alone; what is wrong is that without the first of each.

So are conversations trained whose generation prompt ends with a token that the conversation has not, as one with an
empty ``<think>`` block; and DPO and KTO, in the releases in which they have the bug.
"""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "completion-start-prefix-mismatch"

OVERLAYS = ()
PARITY = True
DATA = True
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

EOS = 1
PROMPTS = [f"w{index} w{index + 1}" for index in range(4)]
COMPLETIONS = [" ".join(f"w{(7 * index + 3 * place) % 50}" for place in range(3 + index % 2)) for index in range(4)]
OTHERS = [" ".join(f"w{(5 * index + 11 * place) % 50}" for place in range(2 + index % 3)) for index in range(4)]
PAIRS = [{"prompt": prompt, "completion": f" {each}"} for prompt, each in zip(PROMPTS, COMPLETIONS, strict=True)]
PREFERENCES = [
    {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}
    for prompt, chosen, rejected in zip(PROMPTS, COMPLETIONS, OTHERS, strict=True)
]

THINKS = (
    "{% for message in messages %}{{ 'w58 ' if message['role'] == 'user' else 'w59 ' }}{{ message['content'] }} <eos> "
    "{% endfor %}{% if add_generation_prompt %}{{ 'w59 w57 ' }}{% endif %}"
)


def ending_words() -> Any:
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
    return words


def ids(text: str) -> list[int]:
    found: list[int] = tiny.tokenizer()(text)["input_ids"]
    return found


def completion_ids(text: str) -> list[int]:
    """With the end of sequence that TRL adds to the text, and the tokenizer's own."""
    return [*ids(text), EOS, EOS]


def by_hand(*, left_out: int) -> float:
    """The mean loss of the completions' tokens, without the first ``left_out`` of each."""
    import torch

    losses = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = tiny.llama(folder, seed=0)
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
            both = torch.tensor([ids(prompt) + completion_ids(completion)])
            each = torch.nn.functional.cross_entropy(model(both).logits[0, :-1], both[0, 1:], reduction="none")
            losses.append(each[len(ids(prompt)) - 1 + left_out :])
    return float(torch.cat(losses).mean())


def train() -> tiny.TrainingResult:
    import trl.trainer.sft_trainer as leaf

    if not knows(leaf, "completion_mask"):
        return tiny.TrainingResult(absent("there is no loss of the completion alone"))
    run = tiny.sft_step(PAIRS, words=ending_words())
    outcome = judge(run.loss, right=by_hand(left_out=0), wrong=by_hand(left_out=1))
    right = outcome.verdict.value == "fixed"
    for method in ("DPO", "KTO"):
        trains_whole_completions(method, right=right)
    if trl_hotfix.status()[ID].state.value == "applied":
        streamed = tiny.sft_step(PAIRS, words=ending_words(), streaming=True)
        assert streamed.difference(run) < 1e-6
        packed = tiny.sft_step(PAIRS, words=ending_words(), packing=True, max_seq_length=64, max_length=64).batch
        whole = sum(len(completion_ids(each)) for each in COMPLETIONS)
        # 0.17 and 0.18 lose the mask where they pack, and train all tokens.
        assert int((packed["labels"] != -100).sum()) in (whole, packed["labels"].numel())
        by_several_processes(run)
        # Before 0.24 the prompt is rendered without the generation prompt, or must be a prefix as a text.
        if knows(leaf, "add_generation_prompt"):
            what_is_cut_is_said()
    return tiny.TrainingResult(outcome, run.loss, run.gradients)


def knows(leaf: Any, name: str) -> bool:
    """Does ``_prepare_dataset``, or a function inside it, have a variable or an argument of that name?"""
    codes = [leaf.SFTTrainer._prepare_dataset.__code__]
    while codes:
        code = codes.pop()
        if name in code.co_varnames or any(name in each for each in code.co_consts if isinstance(each, tuple)):
            return True
        codes += [each for each in code.co_consts if hasattr(each, "co_consts")]
    return False


def trains_whole_completions(method: str, *, right: bool) -> None:
    """One step of the real DPOTrainer or KTOTrainer, where they prepare the data as SFT does."""
    made = one_step(method, ending_words())
    if made is None:
        return
    trainer, _ = made
    rows = list(trainer.train_dataset)
    expected = [completion_ids(each) for each in COMPLETIONS]
    if method == "DPO":
        assert [row["prompt_ids"] for row in rows] == [ids(each) + ([] if right else [EOS]) for each in PROMPTS]
        assert [row["chosen_ids"] for row in rows] == [each[not right :] for each in expected]
        assert [row["rejected_ids"] for row in rows] == [completion_ids(each)[not right :] for each in OTHERS]
    else:
        assert [row["completion_ids"] for row in rows] == [each[not right :] for each in expected]


def one_step(method: str, words: Any) -> Any:
    """The trainer after a step and its gradients, or None where it prepares the data in another way."""
    from datasets import Dataset

    leaf = importlib.import_module(f"trl.trainer.{method.lower()}_trainer")
    trainer_class = getattr(leaf, f"{method}Trainer")
    if not hasattr(trainer_class, "_prepare_dataset") or hasattr(trainer_class, "tokenize_row"):
        return None
    rows = PREFERENCES if method == "DPO" else [{**row, "label": index % 2 == 0} for index, row in enumerate(PAIRS)]
    names = {name: f"{tempfile.gettempdir()}/{method}" for name in ("output_dir", "logging_dir")}
    with tempfile.TemporaryDirectory() as folder:
        policy, reference = tiny.llama(folder, seed=0), tiny.llama(folder, seed=1)
        step = tiny.FirstStep(policy)
        made = tiny.trainer(
            trainer_class,
            model=policy,
            ref_model=reference,
            args=tiny.config(getattr(leaf, f"{method}Config"), max_length=32, **names),
            train_dataset=Dataset.from_list(rows),
            tokenizer=words,
        )
        made.train()
    return made, step.gradients


def by_several_processes(run: tiny.SftRun) -> None:
    """The view goes into worker processes."""
    forked = tiny.sft_step(PAIRS, words=ending_words(), dataset_num_proc=2)
    assert forked.difference(run) < 1e-6


def what_is_cut_is_said() -> None:
    """A conversation, where TRL renders the prompt with the generation prompt."""
    rows = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "completion": [{"role": "assistant", "content": completion}],
        }
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
    ]
    run, said = tiny.warnings_of(lambda: tiny.sft_step(rows, words=tiny.chat_tokenizer(THINKS)))
    counted = sorted((run.batch["labels"] != -100).sum(1).tolist())
    assert counted == sorted(len(ids(each)) + 1 for each in COMPLETIONS)
    assert len(said) == 1
    assert "w57" in said[0]


def unaffected() -> tiny.TrainingResult:
    """Prompts that are prefixes, and texts without a prompt."""
    runs = {
        "pairs": tiny.sft_step(PAIRS),
        "texts": tiny.sft_step([{"text": each} for each in COMPLETIONS], words=ending_words()),
    }
    loss, gradients = tiny.several(runs)
    for method in ("DPO", "KTO"):
        made = one_step(method, tiny.tokenizer())
        if made is not None:
            gradients |= {f"{method} {name}": its for name, its in made[1].items()}
    return tiny.TrainingResult(absent("whom it does not hit"), loss, gradients)
