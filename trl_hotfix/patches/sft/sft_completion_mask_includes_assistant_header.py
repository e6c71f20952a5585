"""SFT takes the header of the assistant's turn for a part of the completion.

``tokenize`` in ``_prepare_dataset`` lets the completion start at the length of what ``apply_chat_template`` makes of
the prompt's messages. Up to 0.18.2 the prompt was rendered with the generation prompt, by ``trl.apply_chat_template``.
0.19.0 calls the tokenizer's own method, without ``add_generation_prompt``. Pull request 4201 adds that in 0.24.0.

The wrapper gives TRL a view of the tokenizer that adds it to the call of a prompt. The next call renders the prompt
with its completion. In 0.19 both have the same arguments, so the view takes them in turn. From 0.20.0 on only the
second one asks for a dict. (Under transformers 5 the first one has to ask for a list: that is another patch,
``sft-prompt-length-is-that-of-a-dict``.)
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, masks_prompts_of_messages, pickled_as_made, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, messages, quick_sft_prepared


@wrapper
def leave_the_header_to_the_prompt(call: Call) -> Any:
    """Give TRL such a tokenizer if the prompts are messages, and the loss is over the completions."""
    if masks_prompts_of_messages(call.__wrapped__, call.args, call.kwargs):
        return call.with_(processing_class=_with_headers(call["processing_class"]))()
    return call()


def _with_headers(tokenizer: Any, code: str = "") -> Any:
    """Return a view of ``tokenizer`` that renders every other conversation, a prompt, with the generation prompt.

    ``code`` is for ``pickled_as_made``.
    """
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        _self_after_prompt = False

        def __reduce_ex__(self, protocol: Any) -> Any:
            return pickled_as_made(_with_headers, self.__wrapped__)

        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
            is_prompt = not self._self_after_prompt and not kwargs.get("return_dict")
            # After an error the next row begins with its prompt.
            self._self_after_prompt = False
            # What a row's chat_template_kwargs say is passed on.
            header = {"add_generation_prompt": True} if is_prompt else {}
            rendered = self.__wrapped__.apply_chat_template(conversation, **{**header, **kwargs})
            self._self_after_prompt = is_prompt
            return rendered

    return View(tokenizer)


def headers_are_not_trained(module: ModuleType) -> Outcome:
    """Count the tokens that are trained of a completion: two letters and an end, and its header with the bug."""
    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("there is no loss of the completion alone")
    pair = {"prompt": messages("uab"), "completion": messages("acd")}
    (row,) = quick_sft_prepared(module, [pair], CharacterTokenizer(), completion_only_loss=True)
    # From 1.7.0 on the mask has become labels.
    marks = row.get("completion_mask") or [label != -100 for label in row.get("labels", ())]
    if not marks:
        return absent("there is no loss of the completion alone")
    return judge(sum(marks), right=3, wrong=4)
