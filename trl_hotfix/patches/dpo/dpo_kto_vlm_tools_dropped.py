"""DPO and KTO on images drop the tools of their conversations.

Without images ``_prepare_dataset`` renders a conversation with the ``tools`` of its row, in KTO since 1.8.0. With
images the collators call ``apply_chat_template(example, self.processor)``, which takes ``chat_template_kwargs`` from
the row, and the tools from an argument. Both trainers keep the column for their collator, and nothing else in these
modules calls the function.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import CharacterProcessor, messages


@wrapper
def pass_the_tools(call: Call) -> Any:
    """Render a conversation with the tools of its row. They may be a text, as JSON."""
    tools = call["example"].get("tools")
    tools = json.loads(tools or "null") if isinstance(tools, str) else tools
    if not tools or call["tools"] is not None:
        return call()
    return call.with_(tools=tools)()


def tools_are_rendered(module: ModuleType) -> Outcome:
    """Collate one row with the tool T, and count the sequences of the batch that have it: two of a pair, one of KTO."""
    row = {"images": [7], "tools": [{"name": "T"}], "prompt": messages("ub"), "label": True}
    row |= {"chosen": messages("ac"), "rejected": messages("ad"), "completion": messages("ac")}
    if hasattr(module, "DataCollatorForVisionPreference"):
        del row["completion"], row["label"]
        collator = module.DataCollatorForVisionPreference(CharacterProcessor())
    elif hasattr(module, "DataCollatorForVisionUnpairedPreference"):
        del row["chosen"], row["rejected"]
        collator = module.DataCollatorForVisionUnpairedPreference(CharacterProcessor(), calculate_kl=False)
    else:
        return absent("this release has no collator of images")
    ids = collator([row])["input_ids"]
    return judge(int((ids == ord("T")).any(1).sum()), right=len(ids), wrong=0)
