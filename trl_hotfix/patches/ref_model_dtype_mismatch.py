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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, module_of, shadowed
from ..model import Outcome
from ..testing import StopConstruction, begin_trainer, single_process, tiny_causal_lm


def load_the_reference_like_the_policy(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make the trainer with loaders that add the policy's dtype and attention, if the policy is a model."""
    model = argument(wrapped, args, kwargs, "model")
    bound = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    # A module that is not a transformers model has neither a dtype nor a config, and its reference cannot be loaded.
    if bound.get("ref_model") is not None or not (hasattr(model, "dtype") and hasattr(model, "config")):
        return wrapped(*args, **kwargs)

    def like_the_policy(load: Callable[..., Any], dtype_name: str) -> Callable[..., Any]:
        def load_like_the_policy(*args: Any, **options: Any) -> Any:
            policy = instance.model
            if not {"dtype", "torch_dtype"} & set(options):
                options[dtype_name] = policy.dtype
            # Of a model of several parts it may be a dict, with one implementation for each.
            options.setdefault("attn_implementation", getattr(policy.config, "_attn_implementation", None))
            return load(*args, **options)

        return load_like_the_policy

    with _replaced_loaders(module_of(wrapped), like_the_policy):
        return wrapped(*args, **kwargs)


@contextmanager
def _replaced_loaders(
    module: ModuleType, decorate: Callable[[Callable[..., Any], str], Callable[..., Any]]
) -> Iterator[None]:
    """Replace each loader of models in ``module`` by ``decorate(loader, the name of its dtype argument)``."""
    import transformers
    from packaging.version import Version

    # transformers 4.56 renamed the argument.
    dtype_name = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"

    def view(models: Any) -> Any:
        return SimpleNamespace(from_pretrained=decorate(models.from_pretrained, dtype_name))

    class Transformers:
        """The module ``transformers`` with decorated loaders in its model classes."""

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(transformers_of_module, attribute)
            return view(value) if hasattr(value, "from_pretrained") else value

    transformers_of_module = getattr(module, "transformers", None)
    with ExitStack() as stack:
        if hasattr(module, "create_model_from_path"):
            load = decorate(module.create_model_from_path, "dtype")
            stack.enter_context(shadowed(module, "create_model_from_path", load))
        else:
            if transformers_of_module is not None:
                stack.enter_context(shadowed(module, "transformers", Transformers()))
            if hasattr(module, "AutoModelForCausalLM"):
                stack.enter_context(shadowed(module, "AutoModelForCausalLM", view(module.AutoModelForCausalLM)))
        yield


def reference_is_loaded_like_the_policy(module: ModuleType) -> Outcome:
    """Check how many bits the references of policies in bfloat16 are loaded with: 32 if no dtype is given.

    What ``model_init_kwargs`` set is left alone.
    """
    import torch

    method = module.__name__.rpartition(".")[2].removesuffix("_trainer").upper()
    trainer_class = getattr(module, f"{method}Trainer")
    parameters = inspect.signature(trainer_class.__init__).parameters
    generates = method in ("GRPO", "RLOO")
    loads_by_path = hasattr(module, "create_model_from_path") and not hasattr(module, "create_reference_model")
    if (generates and "reward_funcs" not in parameters) or not (generates or loads_by_path):
        return absent("in this release the reference is not loaded by this trainer")
    outcomes = []
    for attention in ("flash_attention_2", {"text": "sdpa"}):
        options = _options_of_the_reference(module, trainer_class, attention)
        if options is None:
            return absent("in this release the reference is a copy of the policy")
        dtype = options.get("dtype", options.get("torch_dtype"))
        expected = None if dtype is None else attention
        if options.get("attn_implementation") != expected:
            raise AssertionError(f"a policy with {attention} has a reference that is loaded with {options}")
        bits = 32 if dtype is None else dtype.itemsize * 8
        outcomes.append(judge(bits, right=16, wrong=32, attention=expected))
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the references are not all loaded alike: {outcomes}")
    if "attn_implementation" in inspect.unwrap(trainer_class.__init__).__code__.co_consts:
        return outcomes[0]  # The trainer does it itself.
    for name in ("dtype", "torch_dtype"):
        own = {name: torch.float64, "attn_implementation": "eager"}
        try:
            options = _options_of_the_reference(module, trainer_class, "sdpa", model_init_kwargs=own)
        except ValueError:
            continue  # This release allows them for a policy that is given by name only.
        if (
            options is None
            or {key: options.get(key) for key in own} != own
            or len({"dtype", "torch_dtype"} & set(options)) > 1
        ):
            raise AssertionError(f"with model_init_kwargs {own} the reference is loaded with {options}")
    return outcomes[0]


def _options_of_the_reference(
    module: ModuleType, trainer_class: Any, attention: Any, **settings: Any
) -> dict[str, Any] | None:
    """Return the keyword arguments with which ``__init__`` loads the reference, or None if it copies the policy."""
    import torch
    import transformers

    loads: list[dict[str, Any]] = []

    def record_load(*args: Any, **options: Any) -> None:
        loads.append(options)
        raise StopConstruction

    def stop_at_copy(*args: Any, **options: Any) -> None:
        raise StopConstruction

    text = SimpleNamespace(router_aux_loss_coef=0.0, output_router_logits=False)
    config: Any = SimpleNamespace(
        get_text_config=lambda: text, _attn_implementation=attention, _name_or_path="a policy", model_type=""
    )
    model = tiny_causal_lm(config)
    model.dtype, model.warnings_issued = torch.bfloat16, {}
    model.generation_config = SimpleNamespace(eos_token_id=None)
    policy = SimpleNamespace(from_pretrained=record_load)
    shadows = {
        "create_model_from_path": record_load,
        "AutoModelForCausalLM": policy,
        "AutoConfig": SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(architectures=["Policy"])),
        "transformers": SimpleNamespace(Policy=policy, __version__=transformers.__version__),
        "create_reference_model": stop_at_copy,
    }
    before = {name: getattr(module, name, None) for name in shadows}
    with single_process(module):
        begin_trainer(module, trainer_class, model, shadows=shadows, gradient_checkpointing=False, **settings)
    if any(getattr(module, name, None) is not value for name, value in before.items()):
        raise AssertionError(f"{module.__name__} is left with other loaders")
    return loads[0] if loads else None
