"""A2PO cuts the end of a prompt that is longer than ``max_prompt_length``, and not its beginning.

``_estimate_optimal_values`` and ``_prepare_inputs`` leave the cut to the tokenizer, by ``truncation=True``. It cuts at
its ``truncation_side``, which is the right one by default, and TRL sets no other, even where it loads the tokenizer
itself. A tokenizer has the side as an attribute and takes no argument for it, so the view that the trainer has of it
here sets the attribute for the one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...authoring import Call, judge, pickled_as_made, shadowed, wrapper
from ...model import Outcome
from ...testing import a2po_prompts, a2po_stub, digit_tokenizer


@wrapper
def keep_the_end(call: Call) -> Any:
    """Call the method with a view of the tokenizer that cuts on the left, unless the tokenizer does so itself."""
    tokenizer = call.trainer.processing_class
    if getattr(tokenizer, "truncation_side", "left") == "left":
        return call()
    with shadowed(call.trainer, "processing_class", _cutting_on_the_left(tokenizer, call.act_later())):
        return call()


def _cutting_on_the_left(tokenizer: Any, act: Callable[[], None], code: str = "") -> Any:
    """Return a view of a tokenizer that cuts on the left. It calls ``act`` where that makes a difference."""
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return pickled_as_made(_cutting_on_the_left, self.__wrapped__, act)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            cut_on_the_right = self.__wrapped__(*args, **kwargs)
            # The tokenizer may be a view of another patch, and an attribute has to be set on what it is a view of.
            with shadowed(inspect.unwrap(self.__wrapped__), "truncation_side", "left"):
                encoded = self.__wrapped__(*args, **kwargs)
            if not encoded["input_ids"].equal(cut_on_the_right["input_ids"]):
                act()
            return encoded

    return View(tokenizer)


def prompts_keep_their_end(module: ModuleType) -> Outcome:
    """Add up the last three digits of a prompt of five, for the optimal values and in a step, or the first three."""
    ids = a2po_prompts(a2po_stub(module, digit_tokenizer(), ["2 3 4 5 6"], max_prompt_length=3))
    return judge(sum(int("".join(map(str, batch[0].tolist()))) for batch in ids), right=2 * 456, wrong=2 * 234)
