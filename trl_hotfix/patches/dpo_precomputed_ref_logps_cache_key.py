"""The cache of DPO's precomputed reference log-probs is named without all settings that they depend on.

The name of the cache file is the hash of the dataset's fingerprint and of the reference's weights. The collator cuts
the sequences by ``max_length`` and ``truncation_mode`` after the dataset has its fingerprint, and ``ld_alpha`` weighs
the tokens beyond the length of the shorter completion. From 1.9.0 on the dataset is filtered by ``max_length`` where
``truncation_mode="keep_start"``. The filter's function holds all arguments, so the fingerprint differs whenever any
argument does.

For the call, the fingerprint in the name is a hash of the dataset's fingerprint and of these settings, as the arguments
and the collator have them, which may be the user's own. Afterwards the dataset has its own fingerprint again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import argument, judge, shadowed
from ..model import Outcome
from ..testing import default_arguments, stub_trainer


def name_the_file_by_what_it_depends_on(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Add to the dataset's fingerprint the settings by which the log-probs are computed."""
    dataset = argument(wrapped, args, kwargs, "dataset")
    # The method itself refuses a dataset without a fingerprint.
    if getattr(dataset, "_fingerprint", None) is None:
        return wrapped(*args, **kwargs)
    from datasets.fingerprint import Hasher

    truncation = [
        getattr(owner, name, None)
        for owner in (instance.args, instance.data_collator)
        for name in ("max_length", "truncation_mode")
    ]
    fingerprint = Hasher.hash((dataset._fingerprint, *map(str, truncation), str(instance.ld_alpha)))
    with shadowed(dataset, "_fingerprint", fingerprint):
        return wrapped(*args, **kwargs)


class _FileNamed(Exception):
    """The name of the file is known. The self-test needs no more of the method."""


def files_of_other_settings_have_other_names(module: ModuleType) -> Outcome:
    """Count the names of four settings that all give different log-probs. Right is 4, and the bug gives 1."""
    import torch

    def name(**settings: Any) -> str:
        names: list[str] = []

        def record(fingerprint: str) -> str:
            names.append(fingerprint)
            raise _FileNamed

        settings = {"truncation_mode": "keep_end", **settings}
        arguments = default_arguments(module.DPOConfig, **settings)
        collator = SimpleNamespace(max_length=settings["max_length"], truncation_mode=settings["truncation_mode"])
        trainer = stub_trainer(
            module.DPOTrainer,
            arguments,
            model=torch.nn.Module(),
            ref_model=None,
            data_collator=collator,
            _precompute_model_hash="",
        )
        dataset = SimpleNamespace(_fingerprint="the same", _get_cache_file_path=record)
        with suppress(_FileNamed):
            trainer._precompute_ref_logps(dataset, "train", 1)
        if dataset._fingerprint != "the same":
            raise AssertionError("the dataset has another fingerprint than before")
        return names[0]

    def one_process(objects: Any, from_process: int = 0) -> Any:
        return objects

    # From 1.9.0 on all ranks take the name from the first rank. A self-test must not communicate with other ranks.
    before = getattr(module, "broadcast_object_list", one_process)
    with shadowed(module, "broadcast_object_list", one_process if before is not one_process else before):
        names = [
            name(max_length=12),
            name(max_length=64),
            name(max_length=12, truncation_mode="keep_start"),
            name(max_length=12, ld_alpha=0.5),
        ]
        repeated_name = name(max_length=12)
    if repeated_name != names[0]:
        raise AssertionError("the same settings have two names")
    return judge(len(set(names)), right=4, wrong=1)
