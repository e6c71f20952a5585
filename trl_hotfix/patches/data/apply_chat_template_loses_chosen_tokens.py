"""``apply_chat_template`` cuts the prompt twice, and the chosen answer after the first time only.

Since 0.19.0 (pull request 3522) the prompt is what its text has in common with that of prompt and chosen answer, and
then what this has in common with that of prompt and rejected answer. ``chosen`` is what follows on the first of the
two. 1.9.0 cuts the answers when the prompt is known (pull request 6433).

With the chosen answer as its only completion TRL returns the first prompt, so both together are the whole text.

The targets are the names in the modules of the trainers that have pairs: others call the function in each step.
From 0.29.0 on DPO renders only what has images, by ``apply_chat_template`` in its collator.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome


@wrapper
def keep_the_whole_answer(call: Call) -> Any:
    """Have the chosen answer begin where the prompt ends."""
    act, example = call.act_later(), call["example"]
    result = call()
    # What is no conversation is returned as it is.
    if result is example or not {"prompt", "chosen"} <= result.keys():
        return result
    alone = {name: value for name, value in example.items() if name not in ("chosen", "rejected")}
    first = call.with_(example={**alone, "completion": example["chosen"]})()
    chosen = (first["prompt"] + first["completion"])[len(result["prompt"]) :]
    if chosen == result["chosen"]:
        return result
    act()
    return {**result, "chosen": chosen}


class _Renderer:
    """A tokenizer whose generation prompt begins the answer with <t>."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], add_generation_prompt: bool = False, **kwargs: Any
    ) -> str:
        turns = "".join(f"{message['role'][0]}:{message['content']};" for message in conversation)
        return f"{turns}{'a:<t>' if add_generation_prompt else ''}"


def chosen_answers_are_whole(module: ModuleType) -> Outcome:
    """Count the characters of a chosen answer: all of them, or those behind the beginning that the template has too."""
    names = ("maybe_apply_chat_template", "apply_chat_template")
    apply = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if apply is None or "takewhile" not in inspect.unwrap(apply).__globals__:
        return absent("no pairs are rendered here, or the template must not begin the answer")
    turns = (("prompt", "user", "ab"), ("chosen", "assistant", "<t>cd"), ("rejected", "assistant", "ef"))
    pair = {column: [{"role": role, "content": content}] for column, role, content in turns}
    # The function behind the targets, which is never patched. The body of most targets only calls it.
    if inspect.unwrap(apply).__globals__["apply_chat_template"](pair, _Renderer())["chosen"] != "cd;":
        return absent("this release cuts the answers when the prompt is known")
    return judge(len(apply(pair, _Renderer())["chosen"]), right=len("<t>cd;"), wrong=len("cd;"))
