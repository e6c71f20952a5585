"""A tokenizer that a trainer loads itself is that of the main branch, whatever revision the model has.

The trainers load a model that is given by its name with ``args.model_init_kwargs``, and its tokenizer or processor with
``AutoTokenizer`` or ``AutoProcessor`` by the name alone. GRPO and RLOO load reward models with the same arguments, and
their tokenizers by their names. TRL 1.13.0 passes the revision on in both places.

Which of the two classes loads it, and on which side it pads and truncates, differs between releases. So the wrapper
lets TRL make the calls: meanwhile the two classes in the trainer's module add the revision to those whose turn it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, judge, module_of, shadowed
from ...model import Outcome, Verdict
from ...testing import StopConstruction, absent_if_reexported, default_arguments, single_process, tiny_tokenizer

_LOADERS = ("AutoTokenizer", "AutoProcessor")


def load_at_the_revision_of_the_model(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make the trainer with loaders that add the revision to the calls for models that are given by their names."""
    # From 0.12 to 0.15 a decorator takes the old name, which is no parameter.
    by_name = {name: value for name, value in kwargs.items() if name != "tokenizer"}
    given = {"tokenizer": kwargs.get("tokenizer")} | inspect.signature(wrapped).bind(*args, **by_name).arguments
    options = given.get("model_init_kwargs")  # SFT up to 0.12 has this argument, which replaces that of the config.
    if options is None:
        # Only what stands in the config is read: no ``__getattr__`` of it is run, which TRL may not run either.
        options = getattr(given.get("args"), "__dict__", {}).get("model_init_kwargs") or {}
    revision, of_a_name = options.get("revision"), _which_are_names(given)
    if revision is None or not any(of_a_name):
        return wrapped(*args, **kwargs)
    module, turns = module_of(wrapped), iter(of_a_name)
    with ExitStack() as stack:
        for loader in _LOADERS:
            if hasattr(module, loader):
                view = _at_revision(getattr(module, loader), revision, turns)
                stack.enter_context(shadowed(module, loader, view))
        return wrapped(*args, **kwargs)


def _which_are_names(given: Mapping[str, Any]) -> list[bool]:
    """Return of each tokenizer that the trainer loads, in turn, whether its model is given by its name."""
    from transformers import PreTrainedModel

    is_passed = given.get("processing_class") is not None or given["tokenizer"] is not None
    models = [] if is_passed else [given.get("model")]
    rewards, tokenizers = (_as_list(given.get(name)) for name in ("reward_funcs", "reward_processing_classes"))
    tokenizers += [None] * (len(rewards) - len(tokenizers))
    models += [
        reward
        for reward, tokenizer in zip(rewards, tokenizers, strict=False)
        if tokenizer is None and isinstance(reward, (str, PreTrainedModel))
    ]
    return [isinstance(model, str) for model in models]


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _at_revision(loader: Any, revision: str, turns: Iterator[bool]) -> Any:
    """Return a view of ``AutoTokenizer`` or ``AutoProcessor`` for the calls in their turns."""

    def from_pretrained(name: Any, *args: Any, **options: Any) -> Any:
        if next(turns, False):
            options["revision"] = revision
        return loader.from_pretrained(name, *args, **options)

    return SimpleNamespace(from_pretrained=from_pretrained)


def tokenizers_are_of_the_revision(module: ModuleType) -> Outcome:
    """Check with which revision the real constructor loads the tokenizers of models that are given by their names.

    What a user passes, and what has no revision, is loaded as before, and so is every other argument.
    """
    class_name = module.__name__.rpartition(".")[2].replace("_", "")
    trainer_class = next(value for name, value in vars(module).items() if name.lower() == class_name)
    if (reexported := absent_if_reexported(module, trainer_class.__init__)) is not None:
        return reexported
    if not set(_LOADERS) & set(inspect.unwrap(trainer_class.__init__).__code__.co_names):
        return absent("in this release this trainer loads no tokenizer")
    before = {loader: getattr(module, loader, None) for loader in _LOADERS}
    (plain,) = _loads(module, trainer_class, "org/policy", model_init_kwargs=_options(None))
    outcomes = []
    for revision in ("v1", "v2"):
        (loaded,) = _loads(module, trainer_class, "org/policy", model_init_kwargs=_options(revision))
        if loaded | {"revision": None} != plain | {"revision": None}:
            raise AssertionError(f"the tokenizer is loaded with {loaded}: without a revision with {plain}")
        outcomes.append(judge(float(loaded.get("revision") == revision), right=1.0, wrong=0.0, loaded=loaded))
    if len({outcome.verdict for outcome in outcomes}) != 1 or plain.get("revision") is not None:
        raise AssertionError(f"without a revision it is loaded with {plain}, and with one: {outcomes}")
    is_fixed = outcomes[0].verdict is Verdict.FIXED
    mistakes = _mistakes_elsewhere(module, trainer_class, is_fixed)
    if {loader: getattr(module, loader, None) for loader in _LOADERS} != before:
        mistakes.append(f"{module.__name__} is left with other loaders")
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return outcomes[0]


def _options(revision: str | None) -> dict[str, Any]:
    """Return ``model_init_kwargs``. SFT of 0.9.6 fails without a dtype."""
    return {"torch_dtype": "auto"} | ({} if revision is None else {"revision": revision})


def _mistakes_elsewhere(module: ModuleType, trainer_class: Any, is_fixed: bool) -> list[str]:
    """Return what is wrong with other models, with arguments that only some trainers have, and with reward models."""
    parameters = inspect.signature(trainer_class.__init__).parameters
    revision = "v1" if is_fixed else None
    of_config = {"model_init_kwargs": _options("v1")}
    runs: dict[str, tuple[dict[str, Any], list[str | None]]] = {
        "no arguments": ({"model_init_kwargs": None}, [None]),
        "a model that is passed": ({"model": _model("org/policy"), **of_config}, [None]),
    }
    if "model_init_kwargs" in parameters:
        own = {"constructor": {"model_init_kwargs": _options("v1")}}
        replaced = {"model_init_kwargs": _options("v2"), "constructor": {"model_init_kwargs": _options(None)}}
        runs |= {"an argument": (own, [revision]), "an argument in its place": (replaced, [None])}
    if "reward_funcs" in parameters:
        runs |= _runs_with_rewards(revision, of_config)
    mistakes = []
    for name, (settings, expected) in runs.items():
        try:
            model = settings.pop("model", "org/policy")
            loads = _loads(module, trainer_class, model, count=len(expected), **settings)
        except ValueError as error:
            if "already instantiated" not in str(error):
                raise
            continue  # This release takes these arguments for a model that is given by its name only.
        if (revisions := [load.get("revision") for load in loads]) != expected:
            mistakes.append(f"{name}: tokenizers are loaded at {revisions} instead of {expected}")
    return mistakes


def _runs_with_rewards(revision: str | None, of_config: dict[str, Any]) -> dict[str, Any]:
    """Return runs of trainers that load the tokenizers of reward models, and at which revisions they load them."""
    tokenizer = tiny_tokenizer()
    rewards = [_model("org/policy"), len, "org/reward", "org/policy"]
    own: list[Any] = [tokenizer, None, None, None]
    return {
        "a reward model": ({"rewards": "org/reward", **of_config}, [revision, revision]),
        "reward models": ({"rewards": rewards, **of_config}, [revision, None, revision, revision]),
        "tokenizers of reward models": (
            {"rewards": rewards, "constructor": {"reward_processing_classes": own}, **of_config},
            [revision, revision, revision],
        ),
        "a tokenizer": (
            {"rewards": rewards, "constructor": {"processing_class": tokenizer}, **of_config},
            [None, revision, revision],
        ),
        "one reward model": (
            {"rewards": _model("org/reward"), "constructor": {"processing_class": tokenizer}, **of_config},
            [None],
        ),
    }


def _model(name: str) -> Any:
    """Return a model of transformers' own class that was loaded by this name, without weights."""
    from transformers import LlamaConfig

    model = _class_of_models()(LlamaConfig(pad_token_id=0, bos_token_id=None, eos_token_id=1, num_labels=1))
    model.config._name_or_path, model.generation_config = name, SimpleNamespace(eos_token_id=1)
    return model


@cache
def _class_of_models() -> Any:
    from transformers import LlamaConfig, PreTrainedModel

    class Model(PreTrainedModel):  # type: ignore[misc]
        config_class = LlamaConfig

        def forward(self, input_ids: Any) -> Any: ...

    return Model


def _loads(
    module: ModuleType,
    trainer_class: Any,
    model: Any,
    *,
    model_init_kwargs: Any = None,
    count: int = 1,
    rewards: Any = None,
    constructor: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the arguments of the first ``count`` tokenizers that the real ``__init__`` loads, their names included."""
    import transformers

    loads: list[dict[str, Any]] = []

    def load_tokenizer(name: str, **options: Any) -> Any:
        loads.append({"name": name, **options})
        if len(loads) == count:
            raise StopConstruction
        return tiny_tokenizer()

    def load_model(name: str, *args: Any, **options: Any) -> Any:
        return _model(name)

    class Transformers:
        """The module ``transformers`` with another loader of Llamas."""

        LlamaForCausalLM = SimpleNamespace(from_pretrained=load_model)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(transformers, attribute)

    models = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")
    config = SimpleNamespace(architectures=["LlamaForCausalLM"], model_type="llama")
    shadows: dict[str, Any] = dict.fromkeys(models, SimpleNamespace(from_pretrained=load_model))
    shadows |= dict.fromkeys(_LOADERS, SimpleNamespace(from_pretrained=load_tokenizer))
    shadows["AutoConfig"] = SimpleNamespace(from_pretrained=lambda *_, **__: config)
    shadows |= {"create_model_from_path": load_model, "transformers": Transformers()}
    # accelerate looks for peft at each call. A self-test must not set the seed of the process.
    shadows |= {"is_peft_model": lambda model: False, "set_seed": lambda *args, **kwargs: None}
    arguments = {"model": model, "args": _arguments(module, trainer_class, model_init_kwargs)}
    arguments["train_dataset"] = _rows()
    if "reward_funcs" in inspect.signature(trainer_class.__init__).parameters:
        arguments["reward_funcs"] = list(rewards) if isinstance(rewards, list) else rewards or len
    trainer = object.__new__(trainer_class)
    with ExitStack() as stack:
        stack.enter_context(single_process(module))
        for name in _present(module, shadows):
            stack.enter_context(shadowed(module, name, shadows[name]))
        try:
            trainer_class.__init__(trainer, **arguments, **(constructor or {}))
        except StopConstruction:
            return loads
    raise AssertionError(f"{trainer_class.__name__} loads {loads} alone")


def _present(module: ModuleType, names: Iterable[str]) -> list[str]:
    return [name for name in names if hasattr(module, name)]


@cache
def _rows() -> Any:
    """Return a dataset. To make one, of which a fingerprint is computed, takes longer than the constructor."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "label": [True]})


def _arguments(module: ModuleType, trainer_class: Any, model_init_kwargs: Any) -> SimpleNamespace:
    """Return the defaults of the trainer's config, and what transformers would work out of the device."""
    one_device = {"n_gpu": 0, "distributed_state": SimpleNamespace(distributed_type="NO"), "eval_strategy": "no"}
    one_device |= {"deepspeed_plugin": None, "bf16": False, "gradient_checkpointing": False}
    config_class = getattr(module, trainer_class.__name__.replace("Trainer", "Config"))
    return default_arguments(config_class, model_init_kwargs=model_init_kwargs, **one_device)
