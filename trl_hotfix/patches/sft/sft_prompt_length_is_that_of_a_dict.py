"""SFT takes the length of a dict, 2, for the length of a prompt of messages.

``tokenize`` in ``_prepare_dataset`` lets the completion start at the length of what ``apply_chat_template`` makes of
the prompt's messages. Up to transformers 4 that is a list of token ids. From 5 on it is a dict of the ids and of the
attention mask, unless the call says ``return_dict=False``, as TRL 0.27.1 does.

The wrapper gives TRL a view of the tokenizer that adds this where the call does not set it.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, masks_prompts_of_messages, pickled_as_made, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, default_arguments, messages, single_process, stub_trainer


@wrapper
def take_the_length_of_the_prompt(call: Call) -> Any:
    """Give TRL such a tokenizer if the prompts are messages, and the loss is over the completions."""
    if not masks_prompts_of_messages(call.__wrapped__, call.args, call.kwargs):
        return call()
    return call.with_(processing_class=_with_lists(call["processing_class"]))()


def _with_lists(tokenizer: Any, code: str = "") -> Any:
    """Return a view of ``tokenizer`` that renders a conversation as a list unless it is asked for a dict.

    ``code`` is for ``pickled_as_made``.
    """
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return pickled_as_made(_with_lists, self.__wrapped__)

        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
            return self.__wrapped__.apply_chat_template(conversation, **{"return_dict": False, **kwargs})

    return View(tokenizer)


def prompts_are_not_trained(module: ModuleType) -> Outcome:
    """Count the tokens that are not trained on: the four of the prompt, or two."""
    from datasets import IterableDataset
    from tokenizers import Encoding
    from transformers import BatchEncoding, PreTrainedTokenizerBase

    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("there is no loss of the completion alone")
    if not inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters["return_dict"].default:
        return absent("in this transformers a tokenizer renders a list of token ids")

    class Tokenizer(CharacterTokenizer):
        """It renders a dict unless the call forbids it. TRL asks for its first entry, an encoding of ``tokenizers``."""

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            # Nothing begins an answer: before 0.24.0 a beginning does not belong to the prompt, which is another bug.
            settings = {**kwargs, "return_dict": True, "add_generation_prompt": False}
            rendered = super().apply_chat_template(*args, **settings)
            if not kwargs.get("tokenize", True):
                return rendered
            dictionary = BatchEncoding(dict(rendered), Encoding())
            return dictionary if kwargs.get("return_dict", True) else dictionary["input_ids"]

    class Rows(IterableDataset):  # type: ignore[misc]
        """Rows that are mapped at once, without a cache and a hash."""

        column_names = None

        def __init__(self, *rows: Any) -> None:
            self.rows = rows

        def __iter__(self) -> Any:
            return iter(self.rows)

        def map(self, function: Any, fn_kwargs: Any = None, **kwargs: Any) -> Any:
            return Rows(*({**row, **function(row, **(fn_kwargs or {}))} for row in self.rows))

    rows, tokenizer = Rows({"prompt": messages("uab"), "completion": messages("acd")}), Tokenizer()
    args = default_arguments(module.SFTConfig, max_length=None, shuffle_dataset=False)
    known = {"completion_only_loss": True, "_is_vlm": False, "_tokenizer": tokenizer, "chat_template": None}
    with single_process(module):
        (row,) = stub_trainer(module.SFTTrainer, args, **known)._prepare_dataset(
            rows, tokenizer, args, False, None, "train"
        )
    # The marks are labels from 1.7.0 on, and masks before.
    marks = [int(label != -100) for label in row.get("labels", ())] or row.get("completion_mask")
    if not marks:
        return absent("the length of the prompt is not taken from its tokens")
    return judge(marks.count(0), right=4, wrong=2)
