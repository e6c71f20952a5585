"""``assistant_only_loss`` leaves out the token that ends an assistant's turn where the chat template has it outside.

The mask of ``return_assistant_tokens_mask`` has what stands between ``{% generation %}`` and ``{% endgeneration %}``.
Templates end that before the end-of-turn token, or let the next message render it. The model is then trained on answers
and never on ending one. From 1.6.0 on TRL warns of such a template ("the model may not learn to stop"), and trains all
the same.

The wrapper gives ``_prepare_dataset`` a view of the tokenizer whose masks have the end of turn too: the token of the
added vocabulary that directly follows the tokens of an assistant, unless these end with a special token themselves,
with or without white space behind it. ``</tool_call>`` and ``</think>`` are added tokens that are not special, and no
end of turn follows from them. TRL's check of a template asks for an added token too, but only of an answer in words.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, replaced_argument
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, default_arguments, single_process, stream, stub_trainer


def train_the_end_of_turn(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Prepare a dataset with a view of its tokenizer, if the loss is that of the assistant's tokens alone."""
    if argument(wrapped, args, kwargs, "args").assistant_only_loss:
        view = _view(argument(wrapped, args, kwargs, "processing_class"))
        args, kwargs = replaced_argument(wrapped, args, kwargs, "processing_class", view)
    return wrapped(*args, **kwargs)


def _view(processing_class: Any, code: str = "") -> Any:
    """Return a view of ``processing_class`` whose assistant masks have the ends of turns.

    The view is pickled as a call of this function: for worker processes, and for the cache key of ``datasets``.
    ``code`` is a digest of this file. It is unused except that it changes that key when the file changes.
    """
    import wrapt

    # A processor has a tokenizer inside.
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    # Gemma 3 has thousands of added tokens: they are asked for once, and not for each row.
    added = {token_id: token.special for token_id, token in tokenizer.added_tokens_decoder.items()}
    added.pop(tokenizer.bos_token_id, None)

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return _view, (self.__wrapped__, hashlib.sha256(Path(__file__).read_bytes()).hexdigest())

        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
            result = self.__wrapped__.apply_chat_template(conversation, **kwargs)
            if kwargs.get("return_assistant_tokens_mask"):
                with_ends = functools.partial(_with_ends, tokenizer, added)
                ids, mask = result["input_ids"], result["assistant_masks"]
                # A processor gives a batch of one, of which TRL takes the row.
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
    """Check what is trained of conversations, by templates that have the end of a turn outside, inside, or none.

    An assistant's turn is two letters and an end. Of two such turns six tokens are to be trained, and four are.
    """
    if "assistant_only_loss" not in module.SFTConfig.__dataclass_fields__:
        return absent("this release has no loss of the assistant's tokens alone")
    trained = {name: _trained(module, _Tokenizer(after)) for name, (after, _) in _TEMPLATES.items()}
    outcome = judge(float(len(trained["outside"])), right=6.0, wrong=4.0)
    if outcome.verdict is Verdict.REPRODUCED:
        return outcome
    expected = {name: text for name, (_, text) in _TEMPLATES.items()}
    trained["all"], expected["all"] = _trained(module, _Tokenizer(""), assistant_only_loss=False), "uxaYZ\1uxaYZ\1"
    if trained != expected:
        raise AssertionError(f"{trained} are trained instead of {expected}")
    _check_view()
    return outcome


_TEMPLATES = {
    "outside": ("", "YZ\1YZ\1"),
    "inside": ("\1", "YZ\1YZ\1"),
    "inside, with a line break": ("\1\n", "YZ\1\nYZ\1\n"),
    "inside, twice": ("\1\1", "YZ\1\1YZ\1\1"),
    "outside, behind a line break": ("\n", "YZ\n\1YZ\n\1"),
    "outside, behind a tool call": ("t", "YZt\1YZt\1"),
    "none": ("!", "YZ!YZ!"),
}
"""What a template puts behind an answer inside the mask, and what is to be trained."""


class _Tokenizer(CharacterTokenizer):
    """Its template has a letter for the role, the content and, behind an answer, an end of turn.

    Roles and ends are special tokens. The end of a tool call is an added token and not special. The beginning of a
    sequence is special too, but nobody's turn ends with it.
    """

    bos_token_id = 2  # type: ignore[assignment]

    def __init__(self, inside: str) -> None:
        self.inside = inside

    @property
    def added_tokens_decoder(self) -> dict[int, SimpleNamespace]:
        return {ord(token): SimpleNamespace(special=token != "t") for token in "ua\1\2t"}

    def apply_chat_template(self, messages: list[dict[str, str]], *args: Any, **kwargs: Any) -> Any:
        """Return the tokens. Behind ``!`` comes the beginning of the next sequence, and no end of turn."""
        tokens, mask = "", []
        for message in messages:
            tokens += message["role"][0]
            answer = message["content"] + self.inside if message["role"] == "assistant" else ""
            end = "" if "\1" in self.inside else "\2" if "!" in self.inside else "\1"
            tokens += answer + end if answer else message["content"]
            mask += [0, *[1] * len(answer), *[0] * len(end if answer else message["content"])]
        processed = self(tokens)
        return {**processed, "assistant_masks": mask} if kwargs.get("return_assistant_tokens_mask") else processed


_CONVERSATION = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "YZ"}] * 2


def _trained(module: ModuleType, tokenizer: Any, *, assistant_only_loss: bool = True) -> str:
    """Return the tokens of a conversation that are trained."""
    settings = {"max_length": None, "shuffle_dataset": False, "assistant_only_loss": assistant_only_loss}
    arguments = default_arguments(module.SFTConfig, **settings)
    parts = {"completion_only_loss": False, "_is_vlm": False, "_tokenizer": tokenizer, "chat_template": None}
    trainer = stub_trainer(module.SFTTrainer, arguments, **parts)
    with single_process(module):
        rows = stream([{"messages": _CONVERSATION}])
        (row,) = trainer._prepare_dataset(rows, tokenizer, arguments, False, None, "train")
    ids = row["input_ids"]
    mask = row.get("assistant_masks") or [label != -100 for label in row.get("labels", ids)]
    text: str = tokenizer.decode([token for token, is_trained in zip(ids, mask, strict=True) if is_trained])
    return text


def _check_view() -> None:
    """Check the view of a processor, which has a tokenizer inside, and one that a worker process is sent."""

    class Processor:
        tokenizer = _Tokenizer("")

        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
            return {
                name: [values] for name, values in self.tokenizer.apply_chat_template(conversation, **kwargs).items()
            }

    mask = [0, 0, 0, 1, 1, 1] * 2
    processed = _view(Processor()).apply_chat_template(_CONVERSATION, return_assistant_tokens_mask=True)
    view = _view(_Tokenizer(""))
    received = pickle.loads(pickle.dumps(view)).apply_chat_template(_CONVERSATION, return_assistant_tokens_mask=True)
    if (processed["assistant_masks"], received["assistant_masks"]) != ([mask], mask):
        raise AssertionError(f"the view of a processor gives {processed}, and that of a worker process {received}")
    prompt = view.apply_chat_template(_CONVERSATION)
    if "assistant_masks" in prompt:
        raise AssertionError(f"the view gives a mask that nobody has asked for: {prompt}")

    def prepare(processing_class: Any, args: Any) -> Any:
        return processing_class

    arguments = SimpleNamespace(assistant_only_loss=False)
    if train_the_end_of_turn(prepare, None, (prepare, arguments), {}) is not prepare:
        raise AssertionError("all tokens are trained, and the tokenizer is not handed on as it is")
