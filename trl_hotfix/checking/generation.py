"""Answers from a table by prompt: the n-th answer to a prompt is the same in every run, in whatever order rows come."""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..relations.stand_ins import Batches

LONGEST = 8
"""The tokens of the longest answer, without its end."""

POOL = 96
"""Answers use so many words of the vocabulary."""


class Table:
    """Stands on a model in place of ``generate``."""

    def __init__(self, words: list[int], end: int, pad: int, *, beyond: int, length: int) -> None:
        self._length = length
        self._words, self._end, self._pad, self._beyond = words, end, pad, beyond
        self._asked: Counter[tuple[int, ...]] = Counter()

    def __call__(
        self, input_ids: Any = None, attention_mask: Any = None, generation_config: Any = None, **kwargs: Any
    ) -> Any:
        import torch

        inputs = kwargs.get("inputs") if input_ids is None else input_ids
        if inputs is None:
            raise NotImplementedError("check: this generation has no input_ids, and the table answers to tokens")
        mask = torch.ones_like(inputs) if attention_mask is None else attention_mask
        times = getattr(generation_config, "num_return_sequences", None) or 1
        inputs, mask = inputs.repeat_interleave(times, 0), mask.repeat_interleave(times, 0)
        rows = [row[kept.bool()].tolist() for row, kept in zip(inputs, mask, strict=True)]
        answers = [self.answer(row, times) for row in rows]
        width = max(map(len, answers)) + self._beyond
        padded = torch.tensor([[*one, *[self._pad] * (width - len(one))] for one in answers])
        sequences = torch.cat([inputs, padded], dim=1)
        if kwargs.get("return_dict_in_generate") or getattr(generation_config, "return_dict_in_generate", False):
            raise NotImplementedError("check: the table has no scores, which this trainer asks of generate()")
        return sequences

    @contextmanager
    def counting_again(self) -> Iterator[None]:
        """Inside the block, answer as if nobody had asked before."""
        before, self._asked = self._asked, Counter()
        try:
            yield
        finally:
            self._asked = before

    def answer(self, prompt: Iterable[int], times: int = 1) -> list[int]:
        """Return the next answer to a prompt, with its end."""
        asked = tuple(prompt)
        number = self._asked[asked]
        self._asked[asked] += 1
        seed = zlib.crc32(repr((asked, number)).encode())
        length = self._length or 2 + seed % (LONGEST - 1)
        words = [self._words[(seed // (7 + place) + 31 * place) % len(self._words)] for place in range(length)]
        return [*words, self._end]


def put_on(trainer: Any, tokenizer: Any, *, beyond: int, length: int) -> None:
    """Have the trainer's model answer from a table, with so much padding ``beyond`` the longest answer.

    All answers have this ``length``, or each its own with 0.
    """
    special = set(tokenizer.all_special_ids)
    size = _vocabulary(trainer.model)
    words = [number for number in range(min(len(tokenizer), size)) if number not in special]
    # Spread, since the first ones may be bytes.
    step = max(1, len(words) // POOL)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    config = getattr(trainer, "generation_config", None) or trainer.model.generation_config
    end = config.eos_token_id if config is not None and config.eos_token_id is not None else tokenizer.eos_token_id
    end = end[0] if isinstance(end, list) else end
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else end
    table = Table(words[::step][:POOL], end, pad, beyond=beyond, length=length)
    _apart_in_evaluation(trainer, table)
    for model in {id(each): each for each in (trainer.model, trainer.accelerator.unwrap_model(trainer.model))}.values():
        model.generate, model.generate_batch = table, Batches(table)  # type: ignore[arg-type]


def _apart_in_evaluation(trainer: Any, table: Table) -> None:
    """Have an evaluation count its prompts for itself, so that it does not change the answers of the training."""
    evaluate = trainer.evaluate

    def apart(*args: Any, **kwargs: Any) -> Any:
        with table.counting_again():
            return evaluate(*args, **kwargs)

    trainer.evaluate = apart


def in_order() -> None:
    """Have a trainer keep the rows of a generation in their order; otherwise it shuffles them.

    A step is over the same rows, in whatever batches; only a loss that depends on the batch would see a shuffle.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trl":
            for function in _SHUFFLES & vars(module).keys():
                setattr(module, function, lambda rows: rows)


_SHUFFLES = frozenset({"shuffle_tensor_dict", "shuffle_sequence_dict"})


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)
