"""Train one step with the real SFTTrainer and a tokenizer that appends an end of sequence to each text.

A prompt that is tokenized alone then ends with a token that it lacks before its completion. The expected loss is the
model's mean over all tokens of the completions; the wrong one leaves out the first token of each completion.

The same bug hits conversations whose generation prompt ends with a token that the conversation lacks, such as one with
an empty ``<think>`` block, and DPO and KTO in the releases that have the bug.
"""

from __future__ import annotations

import inspect
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
REJECTED = [" ".join(f"w{(5 * index + 11 * place) % 50}" for place in range(2 + index % 3)) for index in range(4)]
PAIRS = [
    {"prompt": prompt, "completion": f" {completion}"} for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
]
PREFERENCES = [
    {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}
    for prompt, chosen, rejected in zip(PROMPTS, COMPLETIONS, REJECTED, strict=True)
]

THINKING_TEMPLATE = (
    "{% for message in messages %}{{ 'w58 ' if message['role'] == 'user' else 'w59 ' }}{{ message['content'] }} <eos> "
    "{% endfor %}{% if add_generation_prompt %}{{ 'w59 w57 ' }}{% endif %}"
)


def ending_words() -> Any:
    """Return the tiny tokenizer, which appends an end of sequence to each text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
    return tokenizer


def text_ids(text: str) -> list[int]:
    token_ids: list[int] = tiny.tokenizer()(text)["input_ids"]
    return token_ids


def completion_ids(text: str) -> list[int]:
    """Return the token ids with the end of sequence that TRL adds to the text, and the tokenizer's own."""
    return [*text_ids(text), EOS, EOS]


def mean_completion_loss(*, left_out: int) -> float:
    """Return the mean loss of the completions' tokens, without the first ``left_out`` of each."""
    import torch

    losses = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = tiny.llama(folder, seed=0)
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
            tokens = torch.tensor([text_ids(prompt) + completion_ids(completion)])
            token_losses = torch.nn.functional.cross_entropy(
                model(tokens).logits[0, :-1], tokens[0, 1:], reduction="none"
            )
            losses.append(token_losses[len(text_ids(prompt)) - 1 + left_out :])
    return float(torch.cat(losses).mean())


def train() -> tiny.TrainingResult:
    from trl.trainer import sft_trainer

    if not prepares_with(sft_trainer, "completion_mask"):
        return tiny.TrainingResult(absent("there is no loss of the completion alone"))
    run = tiny.sft_step(PAIRS, words=ending_words())
    outcome = judge(run.loss, right=mean_completion_loss(left_out=0), wrong=mean_completion_loss(left_out=1))
    fixed = outcome.verdict.value == "fixed"
    for method in ("DPO", "KTO"):
        check_preference_data(method, fixed=fixed)
    if trl_hotfix.status()[ID].state.value == "applied":
        streamed = tiny.sft_step(PAIRS, words=ending_words(), streaming=True)
        assert streamed.difference(run) < 1e-6
        packed = tiny.sft_step(PAIRS, words=ending_words(), packing=True, max_seq_length=64, max_length=64).batch
        completion_tokens = sum(len(completion_ids(completion)) for completion in COMPLETIONS)
        # 0.17 and 0.18 lose the mask when they pack, and train all tokens.
        assert int((packed["labels"] != -100).sum()) in (completion_tokens, packed["labels"].numel())
        check_worker_processes(run)
        # Before 0.24 the prompt is rendered without the generation prompt, or its text must be a prefix.
        if prepares_with(sft_trainer, "add_generation_prompt"):
            check_cut_prompt_warning()
    return tiny.TrainingResult(outcome, run.loss, run.gradients)


def prepares_with(sft_trainer: Any, name: str) -> bool:
    """Return whether ``_prepare_dataset``, or a function inside it, has a variable or an argument of that name."""
    codes = [inspect.unwrap(sft_trainer.SFTTrainer._prepare_dataset).__code__]
    while codes:
        code = codes.pop()
        if name in code.co_varnames or any(name in names for names in code.co_consts if isinstance(names, tuple)):
            return True
        codes += [constant for constant in code.co_consts if hasattr(constant, "co_consts")]
    return False


def check_preference_data(method: str, *, fixed: bool) -> None:
    """Train one step of the real DPOTrainer or KTOTrainer, where they prepare the data as SFT does, and check them."""
    trainer_and_gradients = one_step(method, ending_words())
    if trainer_and_gradients is None:
        return
    trainer, _ = trainer_and_gradients
    rows = list(trainer.train_dataset)
    chosen, rejected = ([completion_ids(text)[not fixed :] for text in texts] for texts in (COMPLETIONS, REJECTED))
    if method == "DPO":
        prompt_end = [] if fixed else [EOS]
        assert [row["prompt_ids"] for row in rows] == [text_ids(prompt) + prompt_end for prompt in PROMPTS]
        assert [row["chosen_ids"] for row in rows] == chosen
        assert [row["rejected_ids"] for row in rows] == rejected
    else:
        assert [row["completion_ids"] for row in rows] == chosen


def one_step(method: str, tokenizer: Any) -> Any:
    """Return the trainer after a step and its gradients, or None where it prepares the data in another way."""
    import trl
    from datasets import Dataset

    trainer_class = getattr(trl, f"{method}Trainer")
    if not hasattr(trainer_class, "_prepare_dataset") or hasattr(trainer_class, "tokenize_row"):
        return None
    rows = PREFERENCES if method == "DPO" else [{**row, "label": index % 2 == 0} for index, row in enumerate(PAIRS)]
    folders = {name: f"{tempfile.gettempdir()}/{method}" for name in ("output_dir", "logging_dir")}
    with tempfile.TemporaryDirectory() as folder:
        policy, reference = tiny.llama(folder, seed=0), tiny.llama(folder, seed=1)
        step = tiny.FirstStep(policy)
        trainer = tiny.trainer(
            trainer_class,
            model=policy,
            ref_model=reference,
            args=tiny.config(getattr(trl, f"{method}Config"), max_length=32, **folders),
            train_dataset=Dataset.from_list(rows),
            tokenizer=tokenizer,
        )
        trainer.train()
    return trainer, step.gradients


def check_worker_processes(run: tiny.SftRun) -> None:
    """Check that the wrapper's view of the tokenizer can be sent to worker processes."""
    forked = tiny.sft_step(PAIRS, words=ending_words(), dataset_num_proc=2)
    assert forked.difference(run) < 1e-6


def check_cut_prompt_warning() -> None:
    """Train on conversations, where TRL renders the prompt with the generation prompt; check labels and warning."""
    rows = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "completion": [{"role": "assistant", "content": completion}],
        }
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
    ]
    run, messages = tiny.warnings_of(lambda: tiny.sft_step(rows, words=tiny.chat_tokenizer(THINKING_TEMPLATE)))
    label_counts = sorted((run.batch["labels"] != -100).sum(1).tolist())
    assert label_counts == sorted(len(text_ids(completion)) + 1 for completion in COMPLETIONS)
    assert len(messages) == 1
    assert "w57" in messages[0]


def unaffected() -> tiny.TrainingResult:
    """Train on prompts that are prefixes, and on texts without a prompt."""
    runs = {
        "pairs": tiny.sft_step(PAIRS),
        "texts": tiny.sft_step([{"text": completion} for completion in COMPLETIONS], words=ending_words()),
    }
    loss, gradients = tiny.several(runs)
    for method in ("DPO", "KTO"):
        trainer_and_gradients = one_step(method, tiny.tokenizer())
        if trainer_and_gradients is not None:
            _, step_gradients = trainer_and_gradients
            gradients |= {f"{method} {name}": gradient for name, gradient in step_gradients.items()}
    return tiny.TrainingResult(absent("whom it does not hit"), loss, gradients)
