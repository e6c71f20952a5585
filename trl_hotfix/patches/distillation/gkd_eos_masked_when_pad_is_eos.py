"""GKD masks what is generated where it is the padding token, and so the ends of all completions if that is the end too.

``generate_on_policy_outputs`` compares all tokens of a generation, those of the prompts as well, with the padding
token. TRL 1.9.0 (pull request 6357) masks a completion after its first end, and a prompt as it was masked when it was
generated from. Both tensors are changed in place: they are new, and what another patch has noted of them is theirs.

Up to 1.6 the labels of the prompts stay as they are: the loss leaves the prompts out.
"""

from __future__ import annotations

from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported


@wrapper
def keep_the_first_end(call: Call) -> Any:
    """Unmask the end of each completion, and the tokens of the prompts."""
    import torch

    generated = call()
    tokens, attention_mask, labels = generated
    inputs = call["inputs"]
    length = inputs["prompts"].shape[1]
    completions, ends = tokens[:, length:], call["generation_config"].eos_token_id
    if ends is None:
        # In 0.11 the trainer leaves it to the model to know its ends.
        model_config = getattr(call["model"], "generation_config", None)
        ends = getattr(model_config, "eos_token_id", None)
    expected = attention_mask.clone()
    if inputs.get("prompt_attention_mask") is not None:
        expected[:, :length] = inputs["prompt_attention_mask"]
    is_end = torch.zeros_like(completions)
    if ends is not None:
        is_end = torch.isin(completions, torch.as_tensor(ends, device=tokens.device)).long()
    expected[:, length:] = is_end.cumsum(1) == is_end
    if not torch.equal(expected, attention_mask):
        call.act()
        attention_mask.copy_(expected)
        labels[:, length:] = completions.where(expected[:, length:].bool(), -100)
    return generated


def ends_are_labels(module: ModuleType) -> Outcome:
    """Count the labels of two generated completions that are their ends, where the padding is the same token."""
    import torch

    generate = getattr(getattr(module, "GKDTrainer", None), "generate_on_policy_outputs", None)
    if generate is None:
        return absent("this release has no GKD")
    if reexported := absent_if_reexported(module, generate):
        return reexported
    tokens = torch.tensor([[1, 2, 5, 0, 0], [3, 4, 7, 8, 0]])
    prompts = tokens[:, :2]
    inputs = {"prompts": prompts, "prompt_attention_mask": torch.ones_like(prompts)}
    writer = SimpleNamespace(generate=lambda **kwargs: SimpleNamespace(sequences=tokens))
    padding = (0,) if "pad_token_id" in signature(generate).parameters else ()
    _, _, labels = generate(writer, inputs, SimpleNamespace(eos_token_id=0), *padding)
    return judge(int((labels[:, 2:] == 0).sum()), right=2, wrong=0)
