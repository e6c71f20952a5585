"""A2PO pads the prompts of a batch on the side of the tokenizer that it is given, which is the right one by default.

``_estimate_optimal_values`` and ``_prepare_inputs`` tokenize with ``padding=True`` and no ``padding_side``. What the
model generates then comes behind the padding of a shorter prompt, and ``_get_sequence_logps`` takes the log-prob of the
first token from the output at a padding token. TRL sets the left side only on a tokenizer that it loads itself.
OnlineDPO, GRPO and RLOO pass ``padding_side="left"`` in the call, as the view of the tokenizer does here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...authoring import Call, judge, pickled_as_made, shadowed, wrapper
from ...model import Outcome
from ...testing import a2po_prompts, a2po_stub, digit_tokenizer


@wrapper
def pad_on_the_left(call: Call) -> Any:
    """Call the method with a view of the tokenizer that pads on the left, unless the tokenizer does so itself."""
    tokenizer = call.trainer.processing_class
    if getattr(tokenizer, "padding_side", "left") == "left":
        return call()
    with shadowed(call.trainer, "processing_class", _padding_on_the_left(tokenizer, call.act_later())):
        return call()


def _padding_on_the_left(tokenizer: Any, act: Callable[[], None], code: str = "") -> Any:
    """Return a view of a tokenizer that pads on the left. It calls ``act`` where it pads."""
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return pickled_as_made(_padding_on_the_left, self.__wrapped__, act)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            encoded = self.__wrapped__(*args, **{**kwargs, "padding_side": "left"})
            if not encoded["attention_mask"].all():
                act()
            return encoded

    return View(tokenizer)


def prompts_end_at_the_completion(module: ModuleType) -> Outcome:
    """Count the prompts that end in padding. One of two is the shorter, for the optimal values and in a step."""
    ids = a2po_prompts(a2po_stub(module, digit_tokenizer(), ["2 3 4", "5"]))
    return judge(sum(int((batch[:, -1] == 0).sum()) for batch in ids), right=0, wrong=2)
