"""ORPO, CPO, KTO and BCO end a conversation twice if its chat template puts a line break behind the first end.

"Avoid adding if it's already there", says TRL of the end-of-sequence token, and looks at the last token alone. Of
``<|im_end|>\\n``, as ChatML templates end, that is the line break. ORPO and CPO add the token in ``tokenize_row``, by
``add_eos_token_if_needed``; KTO and BCO in the function ``_process_tokens`` of their modules. KTO adds none to
conversations from 1.3.0 on.

The wrapper has TRL see an end where one is. So nothing is cut off afterwards, and what ``max_length`` leaves of a row
is what it would leave of the tokens of the template. The functions that ``datasets`` maps are nested ones for affected
data only: the cache does not give what was prepared without the patch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, module_of, shadowed, wrapper
from ...model import Outcome
from ...testing import (
    CharacterTokenizer,
    StopConstruction,
    constructed,
    default_arguments,
    messages,
    single_process,
    tiny_causal_lm,
)


@wrapper
def leave_the_end_to_the_template(call: Call) -> None:
    """Wrap the constructor, which prepares both datasets."""
    # 0.12.1 and later releases up to 0.15 rename this argument themselves, within the method.
    tokenizer = call.kwargs["tokenizer"] if "tokenizer" in call.kwargs else call["processing_class"]
    train, evaluation = call["train_dataset"], call["eval_dataset"]
    datasets = [train, *(evaluation.values() if isinstance(evaluation, dict) else [evaluation])]
    if not any(_ends_before_its_last_token(dataset, tokenizer) for dataset in datasets if dataset is not None):
        call()
        return
    trainer, module = call.trainer, module_of(call.__wrapped__)
    owner, name = (trainer, "tokenize_row") if hasattr(trainer, "tokenize_row") else (module, "_process_tokens")
    ended = _of_pairs(trainer, module) if owner is trainer else _of_completions(module._process_tokens)
    with shadowed(owner, name, ended):
        call()


def _ends_before_its_last_token(dataset: Any, tokenizer: Any) -> bool:
    """Return whether the first row is a conversation that is rendered with an end and blanks behind it."""
    # TRL applies the same functions to the rows before it tokenises them.
    from trl.data_utils import is_conversational, maybe_apply_chat_template, maybe_extract_prompt

    first = next(iter(dataset), None)
    if first is None or not is_conversational(first):
        return False
    if tokenizer is None:
        return True  # From 1.8.0 on TRL loads that of the model. The functions below look at its tokens.
    rendered = maybe_apply_chat_template(maybe_extract_prompt(first), tokenizer)
    last = rendered["completion" if "completion" in rendered else "chosen"]
    return _is_ended(tokenizer, tokenizer(last, add_special_tokens=False)["input_ids"])


def _is_ended(tokenizer: Any, token_ids: list[int]) -> bool:
    """Return whether an end of sequence is not the last of the tokens, and only blanks are behind it."""
    if tokenizer.eos_token_id not in token_ids:
        return False
    behind = token_ids[len(token_ids) - token_ids[::-1].index(tokenizer.eos_token_id) :]
    return bool(behind) and not tokenizer.decode(behind).strip()


def _of_pairs(trainer: Any, module: ModuleType) -> Callable[..., Any]:
    """Return ``tokenize_row``, which adds no end of sequence to what has one."""
    tokenize_row, add_eos_token_if_needed = trainer.tokenize_row, module.add_eos_token_if_needed

    def add_where_missing(eos_token_id: int, *answers: dict[str, list[int]]) -> Any:
        # TRL leaves alone what ends with the token.
        stand_in = {"input_ids": [eos_token_id]}
        ended = (_is_ended(trainer.processing_class, answer["input_ids"]) for answer in answers)
        sides = (stand_in if is_end else answer for is_end, answer in zip(ended, answers, strict=True))
        add_eos_token_if_needed(eos_token_id, *sides)
        return answers

    def tokenised(*args: Any, **kwargs: Any) -> Any:
        # Here and not around the constructor: with dataset_num_proc, other processes call this.
        with shadowed(module, "add_eos_token_if_needed", add_where_missing):
            return tokenize_row(*args, **kwargs)

    return tokenised


def _of_completions(process_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``_process_tokens``, which adds no end of sequence to what has one."""

    def processed(example: Mapping[str, Any], **options: Any) -> Any:
        tokenizer, answer = options["tokenizer"], example["answer_input_ids"]
        # An encoder and decoder tokenises here, and adds no end of sequence.
        if not options.get("is_encoder_decoder") and _is_ended(tokenizer, answer):
            ends_so = SimpleNamespace(bos_token_id=tokenizer.bos_token_id, eos_token_id=answer[-1])
            options = {**options, "tokenizer": ends_so}
        return process_tokens(example, **options)

    return processed


def conversations_end_once(module: ModuleType) -> Outcome:
    """Count the tokens of a completion whose template ends it with an end of sequence and a line break."""
    method = next(name for name in ("ORPO", "CPO", "KTO", "BCO") if f"{name.lower()}_trainer" in module.__name__)
    trainer_class = getattr(module, f"{method}Trainer")
    adds = getattr(trainer_class, "tokenize_row", None) or vars(module).get("_process_tokens")
    # Another patch may have a layer on it.
    if adds is None or module_of(adds) is not module or not hasattr(module, "maybe_apply_chat_template"):
        return absent("this module adds no end of sequence to what has been through a chat template")
    found: list[dict[str, Any]] = []

    class Tokenizer(CharacterTokenizer):
        def __call__(self, text: Any, **kwargs: Any) -> Any:
            encoded = super().__call__("".join(text))  # A batch has one row.
            return encoded if isinstance(text, str) else {name: [encoded[name]] for name in encoded}

        def render(self, messages: Any, *, add_generation_prompt: bool) -> str:
            text = super().render(messages, add_generation_prompt=add_generation_prompt)
            return text.replace(self.eos_token, f"{self.eos_token}\n")

    class Rows(list[dict[str, Any]]):
        """A dataset of one row, which is mapped at once until it has labels. One of ``datasets`` takes milliseconds."""

        column_names = property(lambda self: list(self[0]))
        shuffle = lambda self, **kwargs: self  # noqa: E731

        def map(self, function: Any, fn_kwargs: Any = MappingProxyType({}), batched: bool = False, **_: Any) -> Any:
            row = function({name: [self[0][name]] for name in self[0]} if batched else self[0], **fn_kwargs)
            found.append({name: list(row[name][0]) if batched else row[name] for name in row})
            if any(name.endswith("_labels") for name in row):
                raise StopConstruction
            return Rows([{**self[0], **found[-1]}])

    config: Any = SimpleNamespace(is_encoder_decoder=False, model_type="tiny", pad_token_id=0)
    config.get_text_config = lambda: config
    model = tiny_causal_lm(config)
    model.warnings_issued, model.generation_config = {}, SimpleNamespace()
    reference = {"ref_model": tiny_causal_lm(config)} if method in ("KTO", "BCO") else {}
    answers: dict[str, Any] = {"chosen": messages("abc"), "rejected": messages("ad")}
    if reference:
        answers = {"completion": messages("abc"), "label": True}
    limits = {"max_length": 99, "max_prompt_length": 49, "gradient_checkpointing": False}
    args = default_arguments(getattr(module, f"{method}Config"), **limits)
    rows = Rows([{"prompt": messages("ue"), **answers}])
    with single_process(module), ExitStack() as stack, suppress(StopConstruction):
        if hasattr(module, "is_sklearn_available"):
            stack.enter_context(shadowed(module, "is_sklearn_available", lambda: True))
        arguments = {"model": model, "args": args, "train_dataset": rows, "processing_class": Tokenizer(), **reference}
        constructed(trainer_class, **arguments)
    (labels,) = (found[-1][name] for name in ("chosen_labels", "completion_labels") if name in found[-1])
    return judge(int(sum(label >= 0 for label in labels)), right=len("bc\1\n"), wrong=len("bc\1\n\1"))
