"""Plain-text prompts that begin with the beginning-of-sequence token of their tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from ..call import Call
from .calls import shadowed
from .views import pickled_as_made


def begun_with_bos(call: Call, prompts: Iterable[Any]) -> Any:
    """Return what ``call`` does when TRL tokenizes plain-text prompts with a BOS, although it asks for none.

    All else stays: messages, texts that all have their own, and tokenizers that add no BOS or more than that. A BOS put
    before the text instead would take the blank from the first word of tokenizers of SentencePiece.
    """
    processor = call.trainer.processing_class
    # A2PO estimates its values within a step: there is a view already.
    plain = inspect.unwrap(processor)
    tokenizer = getattr(plain, "tokenizer", plain)
    if not _only_begins(tokenizer):
        return call()
    if not any(isinstance(prompt, str) and not prompt.startswith(tokenizer.bos_token) for prompt in prompts):
        return call()
    with shadowed(call.trainer, "processing_class", _beginning(processor, tokenizer.bos_token)):
        return call()


def _only_begins(tokenizer: Any) -> bool:
    """Return whether a BOS is all that the tokenizer adds to a text. An end would be before the completion."""
    expected = [tokenizer.bos_token_id, *tokenizer("a", add_special_tokens=False)["input_ids"]]
    return bool(tokenizer("a")["input_ids"] == expected)


def _beginning(processor: Any, bos_token: str, code: str = "") -> Any:
    """Return a view of ``processor`` that puts one BOS before each text, whatever TRL asks for.

    GRPO up to 0.23 cuts prompts, decodes them, takes the padding off and gives them to vLLM, which adds the BOS.
    So the view decodes a BOS in front as padding.
    """
    import wrapt

    plain = inspect.unwrap(processor)
    tokenizer = getattr(plain, "tokenizer", plain)

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return pickled_as_made(_beginning, self.__wrapped__, bos_token)

        def __call__(self, text: list[str], **settings: Any) -> Any:
            texts = [each.removeprefix(bos_token) for each in text]
            return self.__wrapped__(text=texts, **{**settings, "add_special_tokens": True})

        def batch_decode(self, ids: Any, **settings: Any) -> Any:
            if not settings.get("skip_special_tokens"):
                ids = ids.clone()
                first = (ids != tokenizer.pad_token_id).int().argmax(dim=1, keepdim=True)
                begun = ids.gather(1, first) == tokenizer.bos_token_id
                ids.scatter_(1, first, ids.gather(1, first).masked_fill(begun, tokenizer.pad_token_id))
            return self.__wrapped__.batch_decode(ids, **settings)

    return View(processor)
