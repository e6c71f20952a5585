"""The trainers ignore the ``router_aux_loss_coef`` of the model's config and give the auxiliary loss the weight 0.001.

SFT, GRPO and RLOO take the coefficient from their arguments since TRL 1.7.0 (pull requests 6083 and 6085), DPO and KTO
since 1.8.0 (6208 and 6275). In TRL 1.14.0 (issue 7222, pull request 7248) the argument is None unless it is set, and
then the config decides.

The arguments have the config's value only while the trainer is created, so that they can be used again for another
model. A callback sets it when the superclass has finished its own set-up: the model is loaded by then, even if it was
given as a name. DPO, KTO and SFT read the argument after that, SFT to overwrite the config. GRPO and RLOO have read it
before, so the attributes that they derive from it are set again.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import StopConstruction, default_arguments, quick_is_peft_model, tiny_causal_lm, tiny_tokenizer

_UNSET = 0.001


@wrapper
def use_coefficient_of_config(call: Call) -> Any:
    """Run ``__init__`` with the coefficient that the model's config declares, if the arguments set none."""
    from transformers import TrainerCallback

    trainer, act, changed = call.trainer, call.act_later(), list[Any]()

    class WhenLoaded(TrainerCallback):  # type: ignore[misc]
        def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            # In a vision-language model the config of the text model has the router settings.
            config = model.config.get_text_config()
            coefficient = getattr(config, "router_aux_loss_coef", None)
            is_moe = getattr(config, "output_router_logits", None) is not None
            if args.router_aux_loss_coef != _UNSET or not is_moe or coefficient in (None, _UNSET):
                return
            act()
            changed.append(args)
            # GRPO and RLOO have read the argument; the others set their attributes from it after this.
            args.router_aux_loss_coef = trainer.router_aux_loss_coef = coefficient
            trainer.aux_loss_enabled = coefficient != 0.0
            if state.is_world_process_zero:
                logging.getLogger("trl_hotfix").warning(
                    "router_aux_loss_coef is %g in the config of the model, and %g in %s, which is its default: %g is "
                    "used. If you want %g, set it in model.config.",
                    *(coefficient, _UNSET, type(args).__name__, coefficient, _UNSET),
                )

    callback = WhenLoaded()
    try:
        result = call.with_(callbacks=[*(call["callbacks"] or []), callback])()
    finally:
        for settings in changed:
            settings.router_aux_loss_coef = _UNSET
    trainer.remove_callback(callback)
    return result


def coefficient_is_that_of_the_config(module: ModuleType) -> Outcome:
    """Read the coefficient of a trainer with default arguments, for a model whose config declares 0.5.

    The real constructor runs on a superclass that only calls the callbacks, until it has set its metrics.
    """
    method = module.__name__.rpartition(".")[2].removesuffix("_trainer").upper()
    config_class = getattr(module, f"{method}Config", None)
    if config_class is None or "router_aux_loss_coef" not in config_class.__dataclass_fields__:
        return absent("the trainer's arguments have no coefficient in this release")
    from datasets import Dataset

    trainer_class = getattr(module, f"{method}Trainer")

    class Parent(*trainer_class.__bases__):  # type: ignore[misc]
        def __init__(self, *, model: Any, args: Any, callbacks: Any, **kwargs: Any) -> None:
            self.model, self.args, self.accelerator = model, args, SimpleNamespace(parallelism_config=None)
            for callback in callbacks or []:
                callback.on_init_end(args, SimpleNamespace(is_world_process_zero=False), None, model=model)

    class Stub(trainer_class, Parent):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_metrics":
                raise StopConstruction

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    text = SimpleNamespace(router_aux_loss_coef=0.5, output_router_logits=False)
    config: Any = SimpleNamespace(get_text_config=lambda: text, _attn_implementation="sdpa")
    model = tiny_causal_lm(config)
    model.generation_config = SimpleNamespace(eos_token_id=None)
    # No reference model is loaded, and the forward of the model is not replaced.
    of_method: dict[str, Any] = {"SFT": {"loss_type": "nll"}, "GRPO": {"beta": 0.0}, "RLOO": {"beta": 0.0}}
    settings = {"n_gpu": 0, "steps_per_generation": 1, "generation_batch_size": 8, **of_method.get(method, {})}
    by_method = {"ref_model": tiny_causal_lm(config)} if method in ("DPO", "KTO") else {"reward_funcs": len}
    arguments = {
        "model": model,
        "args": default_arguments(config_class, **settings),
        "train_dataset": Dataset.from_dict({"prompt": ["a"], "completion": ["b"]}),
        "processing_class": tiny_tokenizer(),
        **({} if method == "SFT" else by_method),
    }
    trainer: Any = object.__new__(Stub)
    unseeded = (
        shadowed(module, "set_seed", lambda *args, **kwargs: None) if hasattr(module, "set_seed") else nullcontext()
    )
    with unseeded, quick_is_peft_model(module), suppress(StopConstruction):
        Stub.__init__(trainer, **arguments)
    return judge(float(getattr(trainer, "router_aux_loss_coef", text.router_aux_loss_coef)), right=0.5, wrong=_UNSET)
