"""Tokenizers of models that are given by their names are loaded at the revision of the model, and no others.

The real constructors run until they have loaded so many tokenizers, in the module of each trainer that loads one.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from datasets import Dataset
from transformers import LlamaConfig, PreTrainedModel

from trl_hotfix.authoring import shadowed
from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import StopConstruction, default_arguments, single_process, tiny_tokenizer

ID = "tokenizer-ignores-model-revision"
(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
CLASSES = [
    getattr(importlib.import_module(target.module), target.attribute.partition(".")[0])
    for target in gates.targets_here(PATCH)
]
PARAMETERS = {trainer: [*inspect.signature(trainer.__init__).parameters] for trainer in CLASSES}
WITH_REWARDS = [trainer for trainer in CLASSES if "reward_funcs" in PARAMETERS[trainer]]
WITH_OPTIONS = [trainer for trainer in CLASSES if "model_init_kwargs" in PARAMETERS[trainer]]
LOADERS = ("AutoTokenizer", "AutoProcessor")
DATASET = Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "label": [True]})


class Model(PreTrainedModel):
    """A model of transformers' own class, without weights."""

    config_class = LlamaConfig

    def forward(self, input_ids: Any) -> Any: ...


def model_of(name: str, *args: Any, **options: Any) -> Any:
    model = Model(LlamaConfig(pad_token_id=0, bos_token_id=None, eos_token_id=1, num_labels=1))
    model.config._name_or_path, model.generation_config = name, SimpleNamespace(eos_token_id=1)
    return model


def options_of(revision: str | None) -> dict[str, Any]:
    """Return ``model_init_kwargs``. SFT of 0.9.6 fails without a dtype."""
    return {"torch_dtype": "auto"} | ({} if revision is None else {"revision": revision})


def arguments_of(trainer_class: Any, options: Any) -> SimpleNamespace:
    """Return the defaults of the trainer's config, and what transformers would work out of the device."""
    one_device = {"n_gpu": 0, "distributed_state": SimpleNamespace(distributed_type="NO"), "eval_strategy": "no"}
    one_device |= {"deepspeed_plugin": None, "bf16": False, "gradient_checkpointing": False}
    config_class = getattr(module_of(trainer_class), trainer_class.__name__.replace("Trainer", "Config"))
    return default_arguments(config_class, model_init_kwargs=options, **one_device)


def module_of(trainer_class: Any) -> Any:
    return importlib.import_module(trainer_class.__module__)


def loaders_of(trainer_class: Any) -> list[Any]:
    return [getattr(module_of(trainer_class), loader, None) for loader in LOADERS]


def construct(trainer_class: Any, *positional: Any, stand_ins: Mapping[str, Any], **arguments: Any) -> None:
    """Run the constructor with these in the place of the module's own names, until one raises ``StopConstruction``."""
    module = module_of(trainer_class)
    # A test must not set the seed of the process.
    quiet = {"is_peft_model": lambda model: False, "set_seed": lambda *args, **kwargs: None}
    with ExitStack() as stack:
        stack.enter_context(single_process(module))
        for name, stand_in in {**quiet, **stand_ins}.items():
            if hasattr(module, name):
                stack.enter_context(shadowed(module, name, stand_in))
        before = loaders_of(trainer_class)
        with pytest.raises(StopConstruction):
            trainer_class.__init__(object.__new__(trainer_class), *positional, train_dataset=DATASET, **arguments)
        assert loaders_of(trainer_class) == before


def models_by(load: Any) -> dict[str, Any]:
    """Return what loads models, under each name that a release has for it."""

    class Transformers:
        LlamaForCausalLM = SimpleNamespace(from_pretrained=load)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(transformers, attribute)

    config = SimpleNamespace(architectures=["LlamaForCausalLM"], model_type="llama")
    loader = SimpleNamespace(from_pretrained=load)
    return {
        **dict.fromkeys(("AutoModelForCausalLM", "AutoModelForSequenceClassification"), loader),
        "AutoConfig": SimpleNamespace(from_pretrained=lambda *args, **kwargs: config),
        "create_model_from_path": load,
        "transformers": Transformers(),
    }


def loads_of(
    trainer_class: Any,
    options: Any,
    *,
    model: Any = "org/policy",
    rewards: Any = len,
    count: int = 1,
    by_position: bool = False,
    **arguments: Any,
) -> list[dict[str, Any]]:
    """Return the arguments of the first ``count`` tokenizers that are loaded, their names included."""
    loads: list[dict[str, Any]] = []

    def load_tokenizer(name: str, **settings: Any) -> Any:
        loads.append({"name": name, **settings})
        if len(loads) == count:
            raise StopConstruction
        return tiny_tokenizer()

    if trainer_class in WITH_REWARDS:
        arguments["reward_funcs"] = [*rewards] if isinstance(rewards, list) else rewards
    if not by_position:
        arguments["model"] = model
    tokenizers = dict.fromkeys(LOADERS, SimpleNamespace(from_pretrained=load_tokenizer))
    if "args" not in arguments:
        arguments["args"] = arguments_of(trainer_class, options)
    stand_ins = {**models_by(model_of), **tokenizers}
    construct(trainer_class, *([model] if by_position else []), stand_ins=stand_ins, **arguments)
    return loads


def revisions_of(trainer_class: Any, options: Any, expected: Sequence[Any], **arguments: Any) -> list[Any]:
    """Return the revisions of as many tokenizers as are expected."""
    return [load.get("revision") for load in loads_of(trainer_class, options, count=len(expected), **arguments)]


def named(trainer_class: Any) -> str:
    return str(trainer_class.__name__)


@contextmanager
def skipped_if_refused(error: type[Exception], text: str) -> Iterator[None]:
    """Skip the test if this release refuses the arguments so."""
    try:
        yield
    except error as raised:
        if text not in str(raised):
            raise
        pytest.skip(f"in this release: {raised}")


of_each = pytest.mark.parametrize("trainer_class", CLASSES, ids=named)
of_each_with_rewards = pytest.mark.parametrize("trainer_class", WITH_REWARDS, ids=named)


@of_each
@pytest.mark.parametrize("by_position", [False, True])
def test_a_tokenizer_is_loaded_at_the_revision_of_its_model(trainer_class: Any, by_position: bool) -> None:
    (plain,) = loads_of(trainer_class, options_of(None), by_position=by_position)
    assert plain.get("revision") is None
    # One trainer after another, each with its own revision. All other arguments are TRL's.
    for revision in ("v1", "v2", "v1"):
        (load,) = loads_of(trainer_class, options_of(revision), by_position=by_position)
        assert load == {**plain, "revision": revision}


@of_each
def test_trl_loads_it_without_the_revision(trainer_class: Any, switch: Any) -> None:
    with switch.off():
        assert revisions_of(trainer_class, options_of("v1"), [None]) == [None]


@of_each
@pytest.mark.parametrize("options", [None, {"torch_dtype": "auto"}], ids=["no arguments", "others"])
def test_without_a_revision_none_is_added(trainer_class: Any, options: Any) -> None:
    (load,) = loads_of(trainer_class, options)
    assert "revision" not in load or load["revision"] is None


@of_each
def test_the_tokenizer_of_a_model_that_is_passed_is_trls(trainer_class: Any) -> None:
    with skipped_if_refused(ValueError, "already instantiated"):
        assert revisions_of(trainer_class, options_of("v1"), [None], model=model_of("org/policy")) == [None]


@pytest.mark.parametrize("trainer_class", WITH_OPTIONS, ids=named)
@pytest.mark.parametrize(
    ("options", "revision"), [(None, "v1"), ({}, None), (options_of(None), None), (options_of("v2"), "v2")]
)
def test_an_argument_of_the_trainer_replaces_that_of_its_config(
    trainer_class: Any, options: Any, revision: str | None
) -> None:
    for in_config in ("v1", None) if options else ("v1",):
        config = None if in_config is None else options_of(in_config)
        with skipped_if_refused(KeyError, "torch_dtype"):
            assert revisions_of(trainer_class, config, [revision], model_init_kwargs=options) == [revision]


OWN, NONE = tiny_tokenizer(), [None] * 4
REWARDS = [model_of("org/policy"), len, "org/reward", "org/policy"]
RUNS: Mapping[str, tuple[dict[str, Any], list[str | None]]] = {
    "a reward model": ({"rewards": "org/reward"}, ["v1", "v1"]),
    "a reward model that is passed": ({"rewards": model_of("org/reward")}, ["v1", None]),
    "reward models": ({"rewards": REWARDS}, ["v1", None, "v1", "v1"]),
    "no tokenizers of reward models": ({"rewards": REWARDS, "tokenizers": NONE}, ["v1", None, "v1", "v1"]),
    "the first has a tokenizer": ({"rewards": REWARDS, "tokenizers": [OWN, None, None, None]}, ["v1", "v1", "v1"]),
    "another has a tokenizer": ({"rewards": REWARDS, "tokenizers": [None, None, OWN, None]}, ["v1", None, "v1"]),
    "a tokenizer of the policy": ({"rewards": REWARDS, "processing_class": OWN}, [None, "v1", "v1"]),
    "a policy that is passed": ({"rewards": REWARDS, "model": model_of("org/policy")}, [None, None, "v1", "v1"]),
    "nothing by its name": ({"rewards": model_of("org/reward"), "processing_class": OWN}, [None]),
}
"""Arguments of trainers with reward models, and at which revisions they load tokenizers."""


@of_each_with_rewards
@pytest.mark.parametrize("run", RUNS)
def test_the_tokenizers_of_reward_models_are_loaded_so_in_turn(trainer_class: Any, run: str) -> None:
    arguments, expected = RUNS[run]
    arguments = dict(arguments)
    if "tokenizers" in arguments:
        arguments["reward_processing_classes"] = [*arguments.pop("tokenizers")]
    with skipped_if_refused(ValueError, "already instantiated"):
        assert revisions_of(trainer_class, options_of("v1"), expected, **arguments) == expected


@of_each
@pytest.mark.parametrize("name", ["processing_class", "tokenizer", None])
def test_a_trainer_that_is_given_a_tokenizer_is_made_with_trls_loaders(trainer_class: Any, name: str | None) -> None:
    found: list[Any] = []

    def load_model(*args: Any, **options: Any) -> Any:
        found.extend(loaders_of(trainer_class))
        raise StopConstruction

    tokenizers = dict.fromkeys(LOADERS, SimpleNamespace(from_pretrained=lambda *args, **kwargs: tiny_tokenizer()))
    arguments: dict[str, Any] = {} if name is None else {name: tiny_tokenizer()}
    if trainer_class in WITH_REWARDS:
        arguments["reward_funcs"] = len
    with skipped_if_refused(TypeError, "unexpected keyword argument"):
        construct(
            trainer_class,
            stand_ins={**models_by(load_model), **tokenizers},
            model="org/policy",
            args=arguments_of(trainer_class, options_of("v1")),
            **arguments,
        )
    are_trls = [loader is None or loader is tokenizers["AutoTokenizer"] for loader in found]
    assert all(are_trls) == (name is not None)


def test_a_trainer_without_a_config_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    (trainer_class,) = (each for each in CLASSES if each.__name__ == "SFTTrainer")
    config = arguments_of(trainer_class, None)
    monkeypatch.setattr(module_of(trainer_class), "SFTConfig", lambda *args, **kwargs: config)
    assert loads_of(trainer_class, None, args=None)[0].get("revision") is None
