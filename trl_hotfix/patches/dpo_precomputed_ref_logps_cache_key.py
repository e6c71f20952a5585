"""The cache of DPO's and KTO's precomputed reference log-probs is named without all that they depend on.

The name of the cache file is the hash of the dataset's fingerprint and of the reference's weights. The collator cuts
the sequences by ``max_length`` after the dataset has its fingerprint, in DPO by ``truncation_mode`` too, and DPO's
``ld_alpha`` weighs the tokens beyond the length of the shorter completion.

From 1.9.0 on the dataset is filtered by ``max_length`` unless that is None: in KTO always, in DPO where
``truncation_mode="keep_start"``. The filter's function holds all arguments, so the fingerprint differs whenever any
argument does.

For the call, the fingerprint in the name is a hash of the dataset's fingerprint and of these settings, as the arguments
and the collator have them, which may be the user's own. Afterwards the dataset has its own fingerprint again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, shadowed
from ..model import Outcome
from ..testing import absent_if_reexported, default_arguments, single_process, stub_trainer


def name_the_file_by_what_it_depends_on(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Add to the dataset's fingerprint the settings by which the log-probs are computed."""
    from datasets.fingerprint import Hasher

    dataset = argument(wrapped, args, kwargs, "dataset")
    truncation = [
        getattr(owner, name, None)
        for owner in (instance.args, instance.data_collator)
        for name in ("max_length", "truncation_mode")
    ]
    # A stream has no fingerprint, and is refused by the method itself. KTO has no ld_alpha.
    data, ld_alpha = getattr(dataset, "_fingerprint", None), getattr(instance, "ld_alpha", None)
    with shadowed(dataset, "_fingerprint", Hasher.hash((data, *map(str, truncation), str(ld_alpha)))):
        return wrapped(*args, **kwargs)


def files_of_other_settings_have_other_names(module: ModuleType) -> Outcome:
    """Count the names of settings that all give different log-probs. Right is one for each, and the bug gives one."""
    method = "KTO" if "kto" in module.__name__ else "DPO"
    trainer_class = getattr(module, f"{method}Trainer")
    precompute = inspect.unwrap(trainer_class._precompute_ref_logps)
    if reexported := absent_if_reexported(module, precompute):
        return reexported
    if "_fingerprint" not in precompute.__code__.co_names:
        return absent("what is precomputed is not kept in a file")
    if method == "KTO" and "filter" in inspect.unwrap(trainer_class._prepare_dataset).__code__.co_names:
        return absent("the dataset is filtered by max_length, so its own fingerprint depends on all arguments")
    cases: list[dict[str, Any]] = [{"max_length": 12}, {"max_length": 64}]
    # A collator of the user's may cut otherwise, or ask the arguments itself.
    cases += [{"max_length": 12, "of_collator": 64}, {"max_length": 64, "of_collator": None}]
    if method == "DPO":
        cases += [{"max_length": 12, "truncation_mode": "keep_start"}, {"max_length": 12, "ld_alpha": 0.5}]
    with single_process(module):
        names = [_file_name(module, method, **case) for case in cases]
        same, other_data = (_file_name(module, method, data=data, **cases[0]) for data in ("the data", "other data"))
    outcome = judge(len(set(names)), right=len(cases), wrong=1)
    if same != names[0] or other_data in names:
        raise AssertionError(f"the same run gives {same} and then {names[0]}, and other data give {other_data}")
    return outcome


class _FileNamed(Exception):
    """The name of the file is known. The self-test needs no more of the method."""


def _file_name(module: ModuleType, method: str, data: str = "the data", **settings: Any) -> str:
    """Return the name of the file for training and evaluation, and for an evaluation later: it must be the same."""
    import torch

    of_collator = settings.pop("of_collator", settings["max_length"])
    arguments = default_arguments(getattr(module, f"{method}Config"), **{"truncation_mode": "keep_end", **settings})
    trainer = stub_trainer(
        getattr(module, f"{method}Trainer"),
        arguments,
        model=torch.nn.Module(),
        ref_model=None,
        calculate_KL=True,
        data_collator=SimpleNamespace(max_length=of_collator, truncation_mode=arguments.truncation_mode),
        state=SimpleNamespace(global_step=0),
        _precompute_model_hash="",
    )
    names: list[str] = []

    def record(fingerprint: str) -> str:
        names.append(fingerprint)
        raise _FileNamed

    dataset = SimpleNamespace(_fingerprint=data, _get_cache_file_path=record)
    for name, is_training, step in (("train", True, 0), ("eval", True, 0), ("eval", False, 1)):
        trainer.model.train(is_training)
        trainer.state.global_step = step
        with suppress(_FileNamed):
            trainer._precompute_ref_logps(dataset, name, 1)
    if dataset._fingerprint != data or len(set(names)) != 1:
        raise AssertionError(f"{names} are the files of a dataset whose fingerprint is now {dataset._fingerprint}")
    return names[0]
