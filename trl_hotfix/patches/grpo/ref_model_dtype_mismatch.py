"""The reference model is loaded with another dtype and attention implementation than the policy that was passed.

Without a ``ref_model`` the trainers load the reference from the path in the policy's config, with
``args.model_init_kwargs``. These are the arguments with which a policy that is given by name was loaded. A policy
that is given as a model was loaded with arguments that the trainer does not know.

TRL 1.16.0 loads the reference in the policy's ``dtype`` and with its ``attn_implementation``, unless the arguments
set them. The wrapper does the same if the policy is a model. It cannot change ``model_init_kwargs``, as reward models
are loaded with them too. So for the call of ``__init__`` it replaces the loaders in the trainer's module:
``create_model_from_path``, in older releases ``AutoModelForCausalLM`` or the class in ``transformers`` that the
config names. If the policy is a model, the reference is the only model that these load.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, module_of, shadowed, wrapper
from ...model import Outcome
from ...testing import StopConstruction, begin_trainer, single_process, tiny_causal_lm


@wrapper
def load_the_reference_like_the_policy(call: Call) -> Any:
    """Make the trainer with loaders that add the policy's dtype and attention, if the policy is a model."""
    import transformers

    # Not every trainer takes a reference.
    bound = inspect.signature(call.__wrapped__).bind(*call.args, **call.kwargs).arguments
    if bound.get("ref_model") is not None or _dtype_of(bound.get("model")) is None:
        return call()
    trainer, dtype_name = call.trainer, _name_of_dtype(transformers.__version__)

    def like_the_policy(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_like_the_policy(*args: Any, **options: Any) -> Any:
            policy = trainer.model
            if not {"dtype", "torch_dtype"} & set(options):
                options[dtype_name] = policy.dtype
            # Of a model of several parts it may be a dict, with one implementation for each.
            options.setdefault("attn_implementation", getattr(policy.config, "_attn_implementation", None))
            return load(*args, **options)

        return load_like_the_policy

    module = module_of(call.__wrapped__)
    with shadowed(module, *_decorated_loader(module, like_the_policy)):
        return call()


def _dtype_of(policy: Any) -> Any:
    """Return the dtype of a model, or None: a policy given by name has no dtype, nor has one without weights."""
    try:
        return getattr(policy, "dtype", None)
    except StopIteration:  # From 5.0 on transformers looks for the first weight.
        return None


def _name_of_dtype(version: str) -> str:
    """Return what ``from_pretrained`` of this version of transformers calls the dtype: 4.56 renamed it."""
    from packaging.version import Version

    return "dtype" if Version(version) >= Version("4.56") else "torch_dtype"


def _decorated_loader(
    module: ModuleType, decorate: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> tuple[str, Any]:
    """Return the name under which ``module`` has what loads a reference, and the same with decorated loaders."""

    def view(models: Any) -> Any:
        return SimpleNamespace(from_pretrained=decorate(models.from_pretrained))

    if hasattr(module, "create_model_from_path"):
        return "create_model_from_path", decorate(module.create_model_from_path)
    if hasattr(module, "AutoModelForCausalLM"):
        return "AutoModelForCausalLM", view(module.AutoModelForCausalLM)
    transformers = module.transformers

    class Transformers:
        """The module ``transformers`` with decorated loaders in its model classes."""

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(transformers, attribute)
            return view(value) if hasattr(value, "from_pretrained") else value

    return "transformers", Transformers()


def reference_is_loaded_like_the_policy(module: ModuleType) -> Outcome:
    """Make a trainer with a policy in bfloat16, and count the bits of the reference's dtype: 32 if none is given."""
    import torch
    import transformers

    method = module.__name__.rpartition(".")[2].removesuffix("_trainer").upper()
    trainer_class = getattr(module, f"{method}Trainer")
    generates = method in ("GRPO", "RLOO")
    loads_by_path = hasattr(module, "create_model_from_path") and not hasattr(module, "create_reference_model")
    with_rewards = "reward_funcs" in inspect.signature(trainer_class.__init__).parameters
    if not (with_rewards if generates else loads_by_path):
        return absent("in this release the reference is not loaded by this trainer")
    text = SimpleNamespace(router_aux_loss_coef=0.0, output_router_logits=False)
    config: Any = SimpleNamespace(get_text_config=lambda: text, _name_or_path="a policy", model_type="")
    config._attn_implementation = "sdpa"
    model = tiny_causal_lm(config)
    model.dtype, model.warnings_issued = torch.bfloat16, {}
    model.generation_config = SimpleNamespace(eos_token_id=None)
    loads: list[dict[str, Any]] = []

    def load(*args: Any, **options: Any) -> None:
        loads.append(options)
        raise StopConstruction

    def copy(*args: Any, **options: Any) -> None:
        raise StopConstruction

    policy = SimpleNamespace(from_pretrained=load)
    policy_config = SimpleNamespace(architectures=["Policy"])
    shadows = {
        "create_model_from_path": load,
        "AutoModelForCausalLM": policy,
        "AutoConfig": SimpleNamespace(from_pretrained=lambda *args, **options: policy_config),
        "transformers": SimpleNamespace(Policy=policy, __version__=transformers.__version__),
        "create_reference_model": copy,
    }
    with single_process(module):
        begin_trainer(module, trainer_class, model, shadows=shadows, gradient_checkpointing=False)
    if not loads:
        return absent("in this release the reference is a copy of the policy")
    dtype = loads[0].get("dtype", loads[0].get("torch_dtype"))
    return judge(32 if dtype is None else dtype.itemsize * 8, right=16, wrong=32)
