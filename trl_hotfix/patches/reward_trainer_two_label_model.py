"""RewardTrainer loads a model that is given by its name with as many outputs as its config says, two by default.

TRL 0.26.0 loads it with ``create_model_from_path``, and lost ``num_labels=1`` with that. 0.29.0 sets it again (pull
requests 5066 and 5087). The wrapper adds it where TRL calls that function, since without ``args`` there is no
``model_init_kwargs`` to add it to. 0.29.0 also overrules a number of the user's; the wrapper leaves it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, module_of, shadowed
from ..model import Outcome
from ..testing import StopConstruction, default_arguments, single_process


def load_one_output(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the trainer with a loader that gives the model one output, unless the user says how many."""
    options = getattr(argument(wrapped, args, kwargs, "args"), "model_init_kwargs", None) or {}
    # A model that is loaded with a config cannot be given the number besides.
    if not isinstance(argument(wrapped, args, kwargs, "model"), str) or {"num_labels", "config"} & set(options):
        return wrapped(*args, **kwargs)
    module = module_of(wrapped)
    load = module.create_model_from_path

    def load_with_one_output(*args: Any, **options: Any) -> Any:
        return load(*args, num_labels=1, **options)

    with shadowed(module, "create_model_from_path", load_with_one_output):
        return wrapped(*args, **kwargs)


def model_has_one_output(module: ModuleType) -> Outcome:
    """Check how many outputs the real constructor loads a model with that is given by its name: two if it says none."""
    if not hasattr(module, "AutoModelForSequenceClassification"):
        return absent("in this release the trainer loads no model")
    loader = getattr(module, "create_model_from_path", None)
    outcomes = []
    for options in (None, {}, {"dtype": "auto", "revision": "v1"}):
        loaded = _loaded_with(module, "a model", options)
        if loaded is None or any(loaded.get(name) != value for name, value in (options or {}).items()):
            raise AssertionError(f"with model_init_kwargs {options} the model is loaded with {loaded}")
        outcomes.append(judge(loaded.get("num_labels", 2), right=1, wrong=2, options=sorted(loaded)))
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the models are not all loaded alike: {outcomes}")
    passed = SimpleNamespace(config=SimpleNamespace(num_labels=1, _name_or_path="a model"))
    if (loaded := _loaded_with(module, passed, None)) is not None:
        raise AssertionError(f"a model that is passed is loaded with {loaded}")
    # Releases that say the number themselves overrule the user's, or fail.
    if "num_labels" not in str(inspect.unwrap(module.RewardTrainer.__init__).__code__.co_consts):
        choices: tuple[dict[str, Any], ...] = ({"num_labels": 3}, {"config": "a config"})
        for own in choices:
            loaded = _loaded_with(module, "a model", dict(own)) or {}
            if {key: value for key, value in loaded.items() if key in ("num_labels", "config")} != own:
                raise AssertionError(f"with model_init_kwargs {own} the model is loaded with {loaded}")
    if getattr(module, "create_model_from_path", None) is not loader:
        raise AssertionError(f"{module.__name__} is left with another loader")
    return outcomes[0]


def _loaded_with(module: ModuleType, model: Any, options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the arguments with which the real ``__init__`` loads its model, or None if it loads none."""
    loads: list[dict[str, Any]] = []
    loader = getattr(module, "create_model_from_path", None)

    def record_load(name: str, **options: Any) -> Any:
        loads.append(options)
        raise StopConstruction

    def stop(*args: Any, **options: Any) -> Any:
        if getattr(module, "create_model_from_path", None) is not loader:
            raise AssertionError("a trainer that loads no model has another loader")
        raise StopConstruction

    one_process: dict[str, Any] = {"distributed_state": SimpleNamespace(distributed_type="NO")}
    arguments = default_arguments(module.RewardConfig, model_init_kwargs=options, **one_process)
    shadows: dict[str, Any] = {
        "AutoModelForSequenceClassification": SimpleNamespace(from_pretrained=record_load),
        "AutoTokenizer": SimpleNamespace(from_pretrained=stop),
        # A self-test must not set the seed of the process.
        "set_seed": lambda *args, **kwargs: None,
    }
    with ExitStack() as stack:
        stack.enter_context(single_process(module))
        for name in [name for name in shadows if hasattr(module, name)]:
            stack.enter_context(shadowed(module, name, shadows[name]))
        try:
            module.RewardTrainer.__init__(
                object.__new__(module.RewardTrainer), model=model, args=arguments, train_dataset=_rows()
            )
        except StopConstruction:
            return loads[0] if loads else None
    raise AssertionError("the trainer is made without a tokenizer")


@cache
def _rows() -> Any:
    """Return a dataset. To make one, of which a fingerprint is computed, takes longer than the constructor."""
    from datasets import Dataset

    return Dataset.from_dict({"text": ["a"]})
