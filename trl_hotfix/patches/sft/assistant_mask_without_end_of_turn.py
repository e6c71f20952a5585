"""``assistant_only_loss`` leaves out the token that ends an assistant's turn if the chat template has it outside.

The mask of ``return_assistant_tokens_mask`` has what stands between ``{% generation %}`` and ``{% endgeneration %}``.
Some templates end that before the end-of-turn token, or let the next message render the token. Then the model is
trained on answers and never on ending one. From 1.6.0 on TRL warns of such a template ("the model may not learn to
stop"), and trains all the same.

The wrapper gives ``_prepare_dataset`` a view of the tokenizer whose masks have the end of turn too: the token of the
added vocabulary that directly follows the tokens of an assistant, unless these end with a special token themselves,
with or without white space behind it. ``</tool_call>`` and ``</think>`` are added tokens that are not special, and no
end of turn follows from them. TRL's check of a template asks for an added token too, but only of an answer in words.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, pickled_as_made, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, messages, quick_sft_prepared


@wrapper
def train_the_end_of_turn(call: Call) -> Any:
    """Prepare a dataset with a view of its tokenizer, if the loss is over the assistant's tokens alone."""
    if call["args"].assistant_only_loss:
        return call.with_(processing_class=_view(call["processing_class"]))()
    return call()


def _view(processing_class: Any, code: str = "") -> Any:
    """Return a view of ``processing_class`` whose assistant masks have the ends of turns.

    ``code`` is for ``pickled_as_made``.
    """
    import wrapt

    # A processor has a tokenizer inside.
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    # Gemma 3 has thousands of added tokens: they are asked for once, and not for each row.
    added = {token_id: token.special for token_id, token in tokenizer.added_tokens_decoder.items()}
    added.pop(tokenizer.bos_token_id, None)

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return pickled_as_made(_view, self.__wrapped__)

        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
            result = self.__wrapped__.apply_chat_template(conversation, **kwargs)
            if kwargs.get("return_assistant_tokens_mask"):
                with_ends = functools.partial(_with_ends, tokenizer, added)
                ids, mask = result["input_ids"], result["assistant_masks"]
                # A processor gives a batch of one. TRL takes its row.
                is_row = tokenizer is processing_class
                result["assistant_masks"] = with_ends(ids, mask) if is_row else list(map(with_ends, ids, mask))
            return result

    return View(processing_class)


def _with_ends(tokenizer: Any, added: Mapping[Any, bool], ids: list[int], mask: list[int]) -> list[int]:
    """Return the mask of a row of ``ids`` with the end of each turn of an assistant.

    ``added`` are the tokens that may end a turn, and whether they are special.
    """
    with_ends = list(mask)
    for before, place in itertools.pairwise(range(len(ids))):
        if mask[before] and not mask[place] and ids[place] in added:
            # White space behind an end of turn is not what the turn ends with.
            turn = itertools.takewhile(mask.__getitem__, reversed(range(place)))
            last = next((ids[part] for part in turn if tokenizer.decode([ids[part]]).strip()), None)
            with_ends[place] = int(not added.get(last))
    return with_ends


def ends_of_turns_are_trained(module: ModuleType) -> Outcome:
    """Count the tokens that are trained of an answer: two letters and its end, which the template has outside."""
    if "assistant_only_loss" not in module.SFTConfig.__dataclass_fields__:
        return absent("this release has no loss of the assistant's tokens alone")
    rows = [{"messages": messages("ux", "ayz")}]
    (row,) = quick_sft_prepared(module, rows, _EndingOutside(), assistant_only_loss=True)
    mask = row.get("assistant_masks") or [label != -100 for label in row["labels"]]
    return judge(sum(mask), right=3, wrong=2)


class _EndingOutside(CharacterTokenizer):
    """Its template has the first letter of a role, the content, which is the mask of an answer, and an added end."""

    added_tokens_decoder = {1: SimpleNamespace(special=True)}  # noqa: RUF012

    def apply_chat_template(self, messages: list[dict[str, str]], *args: Any, **kwargs: Any) -> Any:
        mask = []
        for message in messages:
            mask += [0, *[int(message["role"] == "assistant")] * len(message["content"]), 0]
        return {**self(self.render(messages, add_generation_prompt=False)), "assistant_masks": mask}
