"""``think_format_reward`` gives 0 to all answers if the chat template itself opens ``<think>``.

The function matches ``^<think>...</think>`` on the completion, and the trainers give it the generated text alone. The
templates of DeepSeek-R1, Qwen3.5 and others end the prompt with ``<think>``, so no completion begins with it. Issue
6966 of TRL; pull request 7141 makes the tag optional for everybody.

The function cannot see the prompt's text. A trainer can: the wrapper is on the methods that call reward functions, and
hands this function the completions with the tag that the prompt of each has opened. Up to 0.25 these methods have
taken a prefilled message off the prompt and put it before the completion; so what was not generated is no completion
of an opened tag.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import (
    PromptTokenizer,
    absent_if_reexported,
    default_arguments,
    single_process,
    stub_that_generates,
    stub_that_scores,
    tiny_causal_lm,
    trainer_and_config,
)

OPEN, CLOSE = "<think>", "</think>"


@wrapper
def judge_with_the_opened_tag(call: Call) -> Any:
    """Give ``think_format_reward`` the ``<think>`` that the prompt has opened."""
    import trl.rewards

    trainer, act = call.trainer, call.act_later()
    of_trl = trl.rewards.think_format_reward
    # A rollout function makes prompts of its own.
    if (
        not any(function is of_trl for function in trainer.reward_funcs)
        or getattr(trainer, "rollout_func", None) is not None
    ):
        return call()

    def think_format_reward(completions: Any, **kwargs: Any) -> Any:
        generated = trainer.processing_class.batch_decode(kwargs["completion_ids"], skip_special_tokens=True)
        rows = zip(kwargs["prompts"], completions, generated, strict=True)
        opened = [_lacks_its_tag(completion, text) and _opens_tag(trainer, prompt) for prompt, completion, text in rows]
        if any(opened):
            act()
            completions = [_with_tag(each) if lacks else each for each, lacks in zip(completions, opened, strict=True)]
        return of_trl(completions=completions, **kwargs)

    functions = [think_format_reward if function is of_trl else function for function in trainer.reward_funcs]
    with shadowed(trainer, "reward_funcs", functions):
        return call()


def _lacks_its_tag(completion: Any, generated: str) -> bool:
    """Return whether the completion closes a tag that it does not open, and is as it was generated."""
    content = completion[0]["content"]
    return OPEN not in content and CLOSE in content and generated.startswith(content)


def _with_tag(completion: Any) -> Any:
    return [{**completion[0], "content": OPEN + completion[0]["content"]}, *completion[1:]]


def _opens_tag(trainer: Any, prompt: Any) -> bool:
    """Return whether the prompt, as the trainer renders it, ends with ``<think>``."""
    if prompt[-1]["role"] == "assistant":
        return False
    settings = getattr(trainer, "chat_template_kwargs", None) or {}
    text = trainer.processing_class.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **settings)
    return bool(text.rstrip().endswith(OPEN))


def answer_after_the_opened_tag_is_well_formed(module: ModuleType) -> Outcome:
    """Score ``a</think>b`` after a prompt that ends with ``<think>``: 1, and 0 if the tag is not seen."""
    import torch
    from trl.rewards import think_format_reward

    class Tokenizer(PromptTokenizer):
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
            return "user: a assistant: <think>\n"

        def batch_decode(self, ids: Any, **kwargs: Any) -> list[str]:
            return ["a</think>b" for _ in ids]

    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO", "SDPO", "OnlineDPO")
    prompt = [{"role": "user", "content": "a"}]
    completion = [{"role": "assistant", "content": "a</think>b"}]
    scored = {"prompts": [prompt], "completions": [completion], "completion_ids_list": [[5]]}
    known: dict[str, Any] = {"reward_funcs": [think_format_reward], "reward_processing_classes": [None]}
    known |= {"reward_func_names": ["think"], "reward_weights": torch.ones(1), "environments": None}
    known |= {"processing_class": Tokenizer()}
    of_online = getattr(trainer_class, "_calculate_rewards_from_functions", None)
    moved = of_online and absent_if_reexported(module, of_online)
    if moved:
        return moved
    parts = trainer_class, default_arguments(config_class), tiny_causal_lm(vocabulary=16)
    with single_process(module):
        if of_online:
            reward = stub_that_generates(*parts, **known)._calculate_rewards_from_functions(**scored)[0]
        elif hasattr(trainer_class, "_calculate_rewards"):
            trainer = stub_that_generates(*parts, **known)
            reward = trainer._calculate_rewards(inputs=[{"prompt": prompt}], **scored)[0, 0]
        else:
            trainer = stub_that_scores(module, [[5, 1]] * 2, [0.0] * 2, model=parts[-1])
            vars(trainer).update(known)
            trainer._generate_and_score_completions([{"prompt": prompt}] * 2)
            (reward,) = trainer._metrics["train"]["rewards/think/mean"]
    return judge(float(reward), right=1.0, wrong=0.0)
