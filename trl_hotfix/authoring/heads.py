"""TRL's own LM heads: a copy of their code with another function in it, and a decoder whose states are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any


def with_names(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Return a copy of the function that has these values under its global names."""
    # Dynamo would read the names in the module of this name, and what it has compiled for another copy of the code.
    names = {name: value for name, value in {**function.__globals__, **names}.items() if name != "__name__"}
    code = function.__code__.replace()
    copy = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@contextmanager
def decoder_returns(model: Any, states: Any) -> Iterator[list[Any]]:
    """Have the decoder return these states inside the block. Give a list of what it was called with."""
    calls: list[Any] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return _Decoded((states,))

    # The decoder of a vision-language model is not its base model before transformers 5. OPT calls one inside of it.
    base = model.base_model if model.base_model is not model else model.model
    with ExitStack() as stack:
        for decoder in {base, getattr(base, "decoder", base)}:
            own = vars(decoder).get("forward")
            stack.callback(setattr if own else delattr, decoder, "forward", *([own] if own else []))
            decoder.forward = forward
        yield calls


class _Decoded(tuple[Any, ...]):
    """What a decoder returns, of any class: the states, and None under all other names."""

    last_hidden_state = property(lambda self: next(iter(self)))

    def __getattr__(self, name: str) -> None:
        return None
