"""``extract_prompt`` steps back over a space before the answers, also from the first character, to index -1.

Since 0.12.0 the prompt of two texts ends before the space that precedes the first difference.
``chosen[idx - 1]`` is the last character of the chosen answer if the texts differ in the first one. If that is a
space, ``idx`` becomes -1: all but the last character of the chosen answer is the prompt, and of each answer the last
character is left.

The targets are the names in the modules of the trainers that can train on an empty prompt. BCO takes the first token
of a prompt and stops with an IndexError. DPO up to 1.0.0rc1 does so too, or gives the model a batch of floats.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome


@wrapper
def keep_answers_whole(call: Call) -> Any:
    """Return an empty prompt and the whole answers where the parts of the rejected answer are not this answer."""
    example, parts = call["example"], call()
    # A row with a prompt, or without a pair, is returned as it is.
    if parts is example or parts["prompt"] + parts["rejected"] == example["rejected"]:
        return parts
    return {**parts, "prompt": "", "chosen": example["chosen"], "rejected": example["rejected"]}


def rejected_answer_is_whole(module: ModuleType) -> Outcome:
    """Count the characters that are left of a rejected answer that has no prefix in common with the chosen one."""
    names = ("extract_prompt", "maybe_extract_prompt")
    extract = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if extract is None:
        return absent("this module splits no pairs")
    if module.__name__.endswith(".dpo_trainer") and not any(
        hasattr(owner, "_tokenize") for owner in (module, module.DPOTrainer)
    ):
        return absent("DPO of this release cannot train on an empty prompt")
    parts = extract({"chosen": "ab ", "rejected": "cde"})
    return judge(len(parts["rejected"]), right=len("cde"), wrong=len("e"))
