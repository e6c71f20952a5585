"""The ranks of SDPO and SDFT begin with the same random state, and draw the same completions.

transformers sets one seed on every rank, so that all build the same model. GRPO, RLOO and Distillation then call
``set_seed(args.seed, device_specific=True)`` in their constructors; SDPO and SDFT, which have GRPO's sampler, do not.
The sampler may have a group lie on several ranks: then each of them has the same prompts, and the same completions.

The wrapper does what GRPO does, at the end of the constructor. It asks the trainer for the rank, since accelerate's
``device_specific`` asks a state of the whole process.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import (
    default_arguments,
    quick_is_peft_model,
    single_process,
    tiny_causal_lm,
    tiny_tokenizer,
    trainer_and_config,
)


@wrapper
def seed_each_rank(call: Call) -> Any:
    """Set another seed on each rank once the trainer is made, where the ranks generate each for itself."""
    result, trainer = call(), call.trainer
    # The ranks that hold parts of one model must draw the same tokens.
    if trainer.accelerator.num_processes > 1 and not trainer.args.use_vllm and trainer.get_tp_size() == 1:
        _set_seed(trainer.args.seed + trainer.accelerator.process_index)
        call.act()
    return result


def _set_seed(seed: int) -> None:
    from transformers import set_seed

    set_seed(seed)


def second_rank_has_a_seed_of_its_own(module: ModuleType) -> Outcome:
    """Construct a trainer on rank 1 of 2: by how much does its last seed differ from that of the run?"""
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler

    trainer_class, config_class = trainer_and_config(module, "SDPO", "SDFT")
    seeds: list[int] = []

    class Parent(Trainer):  # type: ignore[misc]
        """Comes before transformers' own class, which sets the seed."""

        is_deepspeed_enabled = is_fsdp_enabled = False

        def __init__(self, *, model: Any, args: Any, **unused: Any) -> None:
            self.model, self.args = model, args
            self.callback_handler = CallbackHandler([], model, None, None, None)
            self.accelerator = SimpleNamespace(num_processes=2, process_index=1, is_main_process=False)
            seeds.append(args.seed)

    def set_seed(seed: int, device_specific: bool = False) -> None:
        seeds.append(seed + device_specific)

    text = SimpleNamespace(pad_token_id=0)
    model = tiny_causal_lm(SimpleNamespace(get_text_config=lambda: text))
    model.generation_config, model.add_model_tags = SimpleNamespace(eos_token_id=None), lambda tags: None
    settings: dict[str, Any] = {"generation_batch_size": 8, "steps_per_generation": 1}
    settings |= {"teacher_model_kind": "live", "teacher_regularization": "none"}  # as releases name it
    args = default_arguments(config_class, distributed_state=SimpleNamespace(distributed_type="NO"), **settings)
    rewards: Any = {"reward_funcs": len} if trainer_class.__name__ == "SDPOTrainer" else {}
    trainer: Any = object.__new__(type(trainer_class.__name__, (trainer_class, Parent), {}))
    # A self-test must not set the seed of the process. Earlier releases do not have the name.
    ours, trls = shadowed(sys.modules[__name__], "_set_seed", set_seed), shadowed(module, "set_seed", set_seed)
    with ours, trls, single_process(module), quick_is_peft_model(module):
        trainer_class.__init__(
            trainer, model=model, args=args, train_dataset=[{}], processing_class=tiny_tokenizer(), **rewards
        )
    return judge(seeds[-1] - args.seed, right=1, wrong=0)
