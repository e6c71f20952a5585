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

from ...authoring import absent, judge, module_of, shadowed
from ...model import Outcome
from ...testing import StopConstruction, begin_trainer, single_process, tiny_causal_lm


def load_the_reference_like_the_policy(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make the trainer with loaders that add the policy's dtype and attention, if the policy is a model."""
    import transformers

    bound = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    if bound.get("ref_model") is not None or _dtype_of(bound.get("model")) is None:
        return wrapped(*args, **kwargs)
    dtype_name = _name_of_dtype(transformers.__version__)

    def like_the_policy(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_like_the_policy(*args: Any, **options: Any) -> Any:
            policy = instance.model
            if not {"dtype", "torch_dtype"} & set(options):
                options[dtype_name] = policy.dtype
            # Of a model of several parts it may be a dict, with one implementation for each.
            options.setdefault("attn_implementation", getattr(policy.config, "_attn_implementation", None))
            return load(*args, **options)

        return load_like_the_policy

    module = module_of(wrapped)
    with shadowed(module, *_decorated_loader(module, like_the_policy)):
        return wrapped(*args, **kwargs)


def _dtype_of(policy: Any) -> Any:
    """Return the dtype of a model, or None: a policy that is given by name has none, nor has one without weights."""
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
    """Check how many bits the references of policies in bfloat16 are loaded with: 32 if no dtype is given.

    What ``model_init_kwargs`` set is left alone, and so is the loading of a policy that is given by name.
    """
    import torch

    method = module.__name__.rpartition(".")[2].removesuffix("_trainer").upper()
    trainer_class = getattr(module, f"{method}Trainer")
    parameters = inspect.signature(trainer_class.__init__).parameters
    generates = method in ("GRPO", "RLOO")
    loads_by_path = hasattr(module, "create_model_from_path") and not hasattr(module, "create_reference_model")
    if (generates and "reward_funcs" not in parameters) or not (generates or loads_by_path):
        return absent("in this release the reference is not loaded by this trainer")
    names = [_name_of_dtype(version) for version in ("4.55.4", "4.56.0")]
    if names != ["torch_dtype", "dtype"]:
        raise AssertionError(f"before and from transformers 4.56 on the dtype is called {names}")
    if _dtype_of(_WithoutWeights()) is not None:
        raise AssertionError("a model without weights has a dtype")
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
    of_policy = _loaded_with(module, trainer_class, "a policy")
    if of_policy is None or "attn_implementation" in of_policy:
        raise AssertionError(f"a policy that is given by name is loaded with {of_policy}")
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


class _WithoutWeights:
    """A model as transformers 5 has them, without a weight."""

    @property
    def dtype(self) -> Any:
        return next(iter(()))


def _options_of_the_reference(
    module: ModuleType, trainer_class: Any, attention: Any, **settings: Any
) -> dict[str, Any] | None:
    """Return the keyword arguments with which ``__init__`` loads the reference, or None if it copies the policy."""
    import torch

    text = SimpleNamespace(router_aux_loss_coef=0.0, output_router_logits=False)
    config: Any = SimpleNamespace(
        get_text_config=lambda: text, _attn_implementation=attention, _name_or_path="a policy", model_type=""
    )
    model = tiny_causal_lm(config)
    model.dtype, model.warnings_issued = torch.bfloat16, {}
    model.generation_config = SimpleNamespace(eos_token_id=None)
    return _loaded_with(module, trainer_class, model, **settings)


def _loaded_with(module: ModuleType, trainer_class: Any, model: Any, **settings: Any) -> dict[str, Any] | None:
    """Return the keyword arguments with which ``__init__`` loads its first model, or None if it copies one instead."""
    import transformers

    loads: list[dict[str, Any]] = []

    def record_load(*args: Any, **options: Any) -> None:
        loads.append(options)
        raise StopConstruction

    def stop_at_copy(*args: Any, **options: Any) -> None:
        raise StopConstruction

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
        begin_trainer(
            module,
            trainer_class,
            model,
            parent=lambda trainer: _assert_other_names_are_left(module),
            shadows=shadows,
            gradient_checkpointing=False,
            **settings,
        )
    if any(getattr(module, name, None) is not value for name, value in before.items()):
        raise AssertionError(f"{module.__name__} is left with other loaders")
    return loads[0] if loads else None


def _assert_other_names_are_left(module: ModuleType) -> None:
    """Raise unless the ``transformers`` of a trainer's module has its version, also while the trainer is made."""
    import transformers

    version = getattr(module, "transformers", transformers).__version__
    if version != transformers.__version__:
        raise AssertionError(f"transformers has the version {version}")
