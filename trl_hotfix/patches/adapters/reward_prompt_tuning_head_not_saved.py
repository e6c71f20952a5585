"""PEFT 0.15.2 and 0.16 neither train nor save the head of a reward model with prompt, prefix or p-tuning.

For a sequence classification PEFT adds the head to ``modules_to_save`` of the adapter's config, if the config
has such an attribute. The configs of prompt learning lack it: up to 0.14 PEFT kept the names elsewhere, and 0.17.0
gives these configs the attribute (PEFT PR 2646). So the wrapper gives it to a copy of the config, and PEFT does the
rest.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import StopConstruction, default_arguments, single_process


@wrapper
def let_peft_find_the_head(call: Call) -> Any:
    """Give the config of a soft prompt for a model with a head an attribute for the names of that head."""
    config = call["peft_config"]
    if not getattr(config, "is_prompt_learning", False) or config.task_type != "SEQ_CLS":
        return call()
    config = copy.copy(config)
    config.modules_to_save = None
    return call.with_(peft_config=config)()


def head_is_trained(module: ModuleType) -> Outcome:
    """Count the weights of the head that train beside a soft prompt."""
    import peft
    from packaging.version import Version
    from transformers import LlamaConfig, LlamaForSequenceClassification

    if not Version("0.15.2") <= Version(peft.__version__) < Version("0.17"):
        return absent("this PEFT trains the head, or raises an error")
    if not hasattr(module, "get_peft_model"):
        return absent("the trainer makes the adapter elsewhere")
    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    model = LlamaForSequenceClassification(LlamaConfig(**sizes, num_attention_heads=1, num_labels=1, pad_token_id=0))
    made = []

    def make(*args: Any) -> Any:
        made.append(peft.get_peft_model(*args))
        raise StopConstruction

    with single_process(module), shadowed(module, "get_peft_model", make), suppress(StopConstruction):
        module.RewardTrainer(
            model=model,
            args=default_arguments(module.RewardConfig),
            peft_config=peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=1),
        )
    heads = [weight for name, weight in made[0].named_parameters() if "score" in name]
    return judge(sum(head.numel() for head in heads if head.requires_grad), right=4, wrong=0)
