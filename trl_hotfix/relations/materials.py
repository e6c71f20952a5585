"""A tiny model, its tokenizer, rows of unequal lengths, and a generation that answers from a table."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .architectures import SIZES
from .setting import Setting

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
WORDS = 60
FIRST_WORD = 3
"""The number of the first word in the vocabulary."""
GROUP = 4
"""The completions of a prompt."""
LONGEST = 6
"""The tokens of the longest answer of the table, its end included."""


def words(first: int, count: int, step: int = 3) -> str:
    """Return ``count`` words of the vocabulary."""
    return " ".join(f"w{(first + step * place) % WORDS}" for place in range(count))


def prompt(number: int) -> str:
    return words(number, 2 + number % 3)


def preferred(number: int) -> str:
    return " " + words(7 * number + 1, 2 + number % 4)


def rejected(number: int) -> str:
    return " " + words(5 * number + 2, 3 + number % 3, 11)


def rows(kind: str, order: Iterable[int]) -> Any:
    """Return a dataset of rows of unequal lengths, by their numbers. ``kind`` is a name of ``ROWS_OF``."""
    from datasets import Dataset

    return Dataset.from_list([ROWS_OF[kind](number) for number in order])


def _labelled(number: int) -> dict[str, Any]:
    answer = (rejected if number % 2 else preferred)(number // 2)
    return {"prompt": prompt(number // 2), "completion": answer, "label": number % 2 == 0}


def _messages(number: int) -> dict[str, Any]:
    question, answer = (
        {"role": "user", "content": prompt(number)},
        {"role": "assistant", "content": preferred(number).strip()},
    )
    return {"messages": [question, answer]}


def _conversation(number: int) -> dict[str, Any]:
    """Return a row with its messages, and their prompt for the releases that take only that."""
    row = _messages(number)
    return {"prompt": row["messages"][:1], **row}


def _steps(number: int) -> dict[str, Any]:
    steps = [words(number + 3, 2 + number % 3), words(number + 5, 1 + number % 2)]
    return {"prompt": prompt(number), "completions": steps, "labels": [True, number % 2 == 0]}


def _pair(number: int) -> dict[str, Any]:
    return {"prompt": prompt(number), "chosen": preferred(number), "rejected": rejected(number)}


def _ids(text: str) -> list[int]:
    return [FIRST_WORD + int(word[1:]) for word in text.split()]


def _tokenized_pair(number: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for side, answer in (("chosen", preferred), ("rejected", rejected)):
        ids = _ids(prompt(number) + answer(number))
        row |= {f"input_ids_{side}": ids, f"attention_mask_{side}": [1] * len(ids)}
    return row


ROWS_OF: dict[str, Callable[[int], dict[str, Any]]] = {
    "text": lambda number: {"text": words(number, 3 + 3 * number % 11)},
    "completions": lambda number: {"prompt": prompt(number), "completion": preferred(number)},
    "pairs": _pair,
    "tokenized pairs": _tokenized_pair,
    "triples": lambda number: {**_pair(number), "reference": preferred(number + 1)},
    "labelled": _labelled,
    "prompts": lambda number: {"prompt": prompt(number)},
    "tokenized prompts": lambda number: {"input_ids": _ids(prompt(number))},
    "privileged": lambda number: {"prompt": prompt(number), "privileged_context": preferred(number)},
    "messages": _messages,
    "conversations": _conversation,
    "steps": _steps,
}

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}ANSWER"
    "{% else %}{{ message['content'] }}{% endif %} {% endfor %}"
)
ANSWER = "{{ message['content'] }}"


def _template(*, marks_answers: bool) -> str:
    """Return a chat template. transformers of 2024 cannot read one that marks the assistant's answers."""
    answer = f"{{% generation %}}{ANSWER}{{% endgeneration %}}" if marks_answers else ANSWER
    return TEMPLATE.replace("ANSWER", answer)


def tokenizer(setting: Setting, side: str) -> Any:
    """Return a tokenizer of words. ``side`` is where it pads if the setting names none."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([PAD, EOS, UNKNOWN, *(f"w{i}" for i in range(WORDS))])}
    word_level = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    # A word is its bytes: GOLD takes no other kind.
    split, as_bytes = (
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )
    word_level.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_level,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        # Trainers ask for one. It is never put in front of a text.
        bos_token=UNKNOWN,
        padding_side=setting.padding_side or side,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=_template(marks_answers=setting.arguments.get("assistant_only_loss", False)),
    )
    if setting.width > 1:
        pad = tokenizer.pad
        tokenizer.pad = lambda *args, **kwargs: pad(*args, **{**kwargs, "pad_to_multiple_of": setting.width})
    return tokenizer


_HEADS = {0: "CausalLM", 1: "SequenceClassification", 2: "TokenClassification"}
"""The model by the number of its labels."""


def saved_model(folder: Path, setting: Setting, *, seed: int, labels: int = 0) -> Path:
    """Save a Llama of two layers, with a head for ``labels`` if there are any, and return where it is."""
    import torch
    import transformers

    path = folder / f"model-{seed}-{labels}-{setting.pad_embedding}"
    if path.is_dir():
        return path
    # Other ranks may do the same now.
    own = folder / f"{path.name}-{os.getpid()}"
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=WORDS + 4,
        **SIZES,
        **({"num_labels": labels} if labels else {}),
    )
    config.classifier_dropout = 0.0
    model = getattr(transformers, f"LlamaFor{_HEADS[labels]}")(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = setting.pad_embedding
    model.save_pretrained(own)
    # Trainers load that of a reward model or of a teacher themselves.
    tokenizer(Setting(), "left").save_pretrained(own)
    # The first has it.
    with contextlib.suppress(OSError):
        own.rename(path)
    return path


def model(folder: Path, setting: Setting, *, seed: int = 0, labels: int = 0) -> Any:
    """Return that model from disk in float32, with an adapter if the setting gives it one."""
    import transformers

    path = saved_model(folder, setting, seed=seed, labels=labels)
    loaded = getattr(transformers, f"AutoModelFor{_HEADS[labels]}").from_pretrained(path)
    if setting.adapter != "model" or seed != 0:
        return loaded
    from peft import get_peft_model

    return get_peft_model(loaded, lora(loaded))


def lora(base: Any) -> Any:
    from peft import LoraConfig

    task = {"SequenceClassification": "SEQ_CLS", "TokenClassification": "TOKEN_CLS"}.get(
        type(base).__name__.partition("For")[2], "CAUSAL_LM"
    )
    return LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type=task)


RETURNED = ("return_dict_in_generate", "output_scores", "output_logits")


class AnswersFromTable:
    """What stands on a model in place of ``generate``. The n-th answer to a prompt is the same in every run.

    A prompt has ``count`` answers, one after the other, whichever model is asked. ``policy`` is the model whose logits
    are returned to a trainer that asks for them.
    """

    def __init__(self, policy: Any, count: int, *, equal_lengths: bool = False) -> None:
        self.policy, self.count, self.equal_lengths = policy, count, equal_lengths
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.first = 0

    def __call__(
        self, input_ids: Any = None, attention_mask: Any = None, generation_config: Any = None, **kwargs: Any
    ) -> Any:
        import torch

        inputs = kwargs["inputs"] if input_ids is None else input_ids
        # Early releases leave it to the model to answer a prompt several times.
        times = getattr(generation_config, "num_return_sequences", None) or 1
        inputs = inputs.repeat_interleave(times, 0)
        answers = [self.answer((token for token in row if token), times) for row in inputs.tolist()]
        width = max(map(len, answers))
        padded = torch.tensor([[*one, *[0] * (width - len(one))] for one in answers])
        sequences = torch.cat([inputs, padded], dim=1)
        asked = {name for name in RETURNED if kwargs.get(name) or getattr(generation_config, name, False)}
        if "return_dict_in_generate" not in asked:
            return sequences
        logits = self._logits(sequences, width) if len(asked) > 1 else ()
        scores = tuple(each / generation_config.temperature for each in logits)
        return SimpleNamespace(sequences=sequences, logits=logits, scores=scores)

    def answer(self, prompt: Iterable[int], times: int) -> list[int]:
        """Return the next answer to a prompt, with its end. The caller wants ``times`` of them."""
        asked = tuple(prompt)
        number = (self.first + self.asked[asked]) % max(self.count, times)
        self.asked[asked] += 1
        first = (7 * sum(asked) + 13 * number) % WORDS
        length = LONGEST - 1 if self.equal_lengths else 1 + (number + sum(asked)) % (LONGEST - 1)
        return [*(FIRST_WORD + (first + 5 * place) % WORDS for place in range(length)), 1]

    def _logits(self, sequences: Any, width: int) -> tuple[Any, ...]:
        """Return the logits of each place of the answers."""
        import torch

        mask = (sequences != 0).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = self.policy(input_ids=sequences, attention_mask=mask, position_ids=positions).logits
        return tuple(logits[:, -width - 1 : -1].unbind(1))


def answering_as(model: Any, other: Any) -> Any:
    """Return another model, which answers as this one does."""
    vars(other).update({name: each for name, each in vars(model).items() if name.startswith("generate")})
    return other


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return a number for each completion that depends on its words alone."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    numbers = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in texts]
    return [(sum(each) % 17) / 8 for each in numbers]


def keep_rewarded(group_completions: list[Any], group_rewards: list[list[float]], **kwargs: Any) -> list[list[float]]:
    """Return a number for each completion of each group. The completions with the largest are kept."""
    return group_rewards
