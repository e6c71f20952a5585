"""The reference model is loaded in another dtype, and with another attention, than the policy that was passed.

Where there is no ``ref_model``, GRPO (from 0.19.0 on), RLOO (0.22.0), DPO (0.29.0) and KTO (1.8.0) load the reference
from where the policy's config says that it came from, with ``args.model_init_kwargs``. Those are what a policy that is
given by name was loaded with. A policy that is given as a model was loaded with something else: it may be in bfloat16
with FlashAttention, while the reference is in float32, which is the default, with sdpa. The two then round differently:
the KL divergence of the first step is not 0, the reference margins are off by as much, and the reference takes twice
the memory. Nothing is said.

TRL 1.16.0 loads the reference in the policy's ``dtype`` and with its ``attn_implementation``, unless the arguments say
otherwise. So does this, where the policy is a model. It cannot be had from the arguments, from which reward models are
loaded too. So what ``__init__`` loads models by is another one for the call, in the module of the trainer:
``create_model_from_path``, in older releases ``AutoModelForCausalLM`` or the class in ``transformers`` that the config
names. With a policy that is a model, the reference is the only one that is loaded by these. Under ZeRO-3 and FSDP, GRPO
up to 0.18 loads its reference so too; it is a copy of the policy otherwise, and these releases are not repaired.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, module_of, shadowed
from ..model import Outcome
from ..stubs import StopConstruction, begin_trainer, tiny_causal_lm


def load_the_reference_like_the_policy(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make the trainer with loaders that add the policy's dtype and attention, if the policy is a model."""
    model = argument(wrapped, args, kwargs, "model")
    bound = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    # A module that is no model of transformers has neither a dtype nor a config, and its reference cannot be loaded.
    if bound.get("ref_model") is not None or not (hasattr(model, "dtype") and hasattr(model, "config")):
        return wrapped(*args, **kwargs)

    def like_the_policy(load: Callable[..., Any], name: str) -> Callable[..., Any]:
        def loaded(*args: Any, **given: Any) -> Any:
            policy = instance.model
            if not {"dtype", "torch_dtype"} & set(given):
                given[name] = policy.dtype
            attention = getattr(policy.config, "_attn_implementation", None)
            # A model of several parts may have one for each.
            if isinstance(attention, str):
                given.setdefault("attn_implementation", attention)
            return load(*args, **given)

        return loaded

    with _loaders(module_of(wrapped), like_the_policy):
        return wrapped(*args, **kwargs)


@contextmanager
def _loaders(module: ModuleType, made: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> Iterator[None]:
    """In here, what this module loads models by is ``made`` of it and of the name that it has for the dtype."""
    import transformers
    from packaging.version import Version

    # transformers 4.56 has given it another name.
    name = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"

    def view(models: Any) -> Any:
        return SimpleNamespace(from_pretrained=made(models.from_pretrained, name))

    class Transformers:
        """The module, whose models are loaded so."""

        def __getattr__(self, attribute: str) -> Any:
            found = getattr(before, attribute)
            return view(found) if hasattr(found, "from_pretrained") else found

    before = getattr(module, "transformers", None)
    with ExitStack() as stack:
        if hasattr(module, "create_model_from_path"):
            load = made(module.create_model_from_path, "dtype")
            stack.enter_context(shadowed(module, "create_model_from_path", load))
        else:
            if before is not None:
                stack.enter_context(shadowed(module, "transformers", Transformers()))
            if hasattr(module, "AutoModelForCausalLM"):
                stack.enter_context(shadowed(module, "AutoModelForCausalLM", view(module.AutoModelForCausalLM)))
        yield


def reference_is_loaded_like_the_policy(module: ModuleType) -> Outcome:
    """With which dtype does ``__init__`` load the reference of a policy in bfloat16? In bits, 32 where it says none."""
    method = module.__name__.rpartition(".")[2].removesuffix("_trainer").upper()
    trainer_class = getattr(module, f"{method}Trainer")
    known = inspect.signature(trainer_class.__init__).parameters
    of_a_step = method in ("GRPO", "RLOO")
    loads = hasattr(module, "create_model_from_path") and not hasattr(module, "create_reference_model")
    if (of_a_step and "reward_funcs" not in known) or not (of_a_step or loads):
        return absent("in this release the reference is not loaded by this trainer")
    given = _given_to_the_reference(module, trainer_class)
    if given is None:
        return absent("in this release the reference is a copy of the policy")
    dtype = given.get("dtype", given.get("torch_dtype"))
    attention = given.get("attn_implementation")
    if (attention == "flash_attention_2") != (dtype is not None):
        raise AssertionError(f"the reference is loaded with {given}")
    return judge(32 if dtype is None else dtype.itemsize * 8, right=16, wrong=32, attention=attention)


def _given_to_the_reference(module: ModuleType, trainer_class: Any) -> dict[str, Any] | None:
    """What ``__init__`` loads the reference with; None if it is a copy."""
    import torch
    import transformers

    found: list[dict[str, Any]] = []

    def note(*args: Any, **given: Any) -> None:
        found.append(given)
        raise StopConstruction

    def copied(*args: Any, **given: Any) -> None:
        raise StopConstruction

    text = SimpleNamespace(router_aux_loss_coef=0.0, output_router_logits=False)
    config: Any = SimpleNamespace(
        get_text_config=lambda: text, _attn_implementation="flash_attention_2", _name_or_path="a policy", model_type=""
    )
    model = tiny_causal_lm(config)
    model.dtype, model.warnings_issued = torch.bfloat16, {}
    model.generation_config = SimpleNamespace(eos_token_id=None)
    policy = SimpleNamespace(from_pretrained=note)
    shadows = {
        "create_model_from_path": note,
        "AutoModelForCausalLM": policy,
        "AutoConfig": SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(architectures=["Policy"])),
        "transformers": SimpleNamespace(Policy=policy, __version__=transformers.__version__),
        "create_reference_model": copied,
    }
    begin_trainer(module, trainer_class, model, shadows=shadows)
    return found[0] if found else None
