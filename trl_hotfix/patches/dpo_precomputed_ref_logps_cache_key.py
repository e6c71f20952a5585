"""DPO takes the precomputed reference log-probs of an earlier run that cut its sequences elsewhere.

With ``precompute_ref_log_probs=True`` they are kept in a file whose name is the hash of the dataset's fingerprint and
of the reference's weights. What they also depend on is not in it: ``max_length`` and ``truncation_mode``, by which the
collator cuts the sequences, after the dataset has its fingerprint, and ``ld_alpha``, which weighs the tokens beyond the
length of the shorter completion. A run with another value of one of these finds the file of the run before: policy and
reference are then compared on different tokens, and nothing is said. From 1.9.0 on the dataset is filtered by
``max_length`` where ``truncation_mode="keep_start"``, by a function that holds all arguments, so there the
fingerprint differs whenever any of them does; with ``"keep_end"``, and with ``max_length=None``, nothing has changed.

Here the fingerprint in the name is, for the call, that of the dataset and of these settings: as the arguments
have them, and as the collator does, which may be the user's own. A file from before is therefore never taken, whatever
it was made with, and is made again once. The dataset is left with the fingerprint that it had.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import argument, judge, shadowed
from ..model import Outcome
from ..stubs import default_arguments, stub_trainer


def name_the_file_by_what_it_depends_on(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let the dataset's fingerprint say how the log-probs are computed."""
    dataset = argument(wrapped, args, kwargs, "dataset")
    # A dataset without one is for the method to refuse.
    if getattr(dataset, "_fingerprint", None) is None:
        return wrapped(*args, **kwargs)
    from datasets.fingerprint import Hasher

    cuts = [
        getattr(owner, name, None)
        for owner in (instance.args, instance.data_collator)
        for name in ("max_length", "truncation_mode")
    ]
    of_both = Hasher.hash((dataset._fingerprint, *map(str, cuts), str(instance.ld_alpha)))
    with shadowed(dataset, "_fingerprint", of_both):
        return wrapped(*args, **kwargs)


class _Named(Exception):
    """The name of the file is known; what is done with it is no part of the test."""


def files_of_other_settings_have_other_names(module: ModuleType) -> Outcome:
    """How many names do four settings get, of which each two give other log-probs? Right is 4, and the bug gives 1."""
    import torch

    def name(**settings: Any) -> str:
        names: list[str] = []

        def note(fingerprint: str) -> str:
            names.append(fingerprint)
            raise _Named

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
        dataset = SimpleNamespace(_fingerprint="the same", _get_cache_file_path=note)
        with suppress(_Named):
            trainer._precompute_ref_logps(dataset, "train", 1)
        if dataset._fingerprint != "the same":
            raise AssertionError("the dataset has another fingerprint than before")
        return names[0]

    def one_process(objects: Any, from_process: int = 0) -> Any:
        return objects

    # From 1.9.0 on all ranks take the name of the first, which a self-test does not ask.
    before = getattr(module, "broadcast_object_list", one_process)
    with shadowed(module, "broadcast_object_list", one_process if before is not one_process else before):
        names = [
            name(max_length=12),
            name(max_length=64),
            name(max_length=12, truncation_mode="keep_start"),
            name(max_length=12, ld_alpha=0.5),
        ]
        again = name(max_length=12)
    if again != names[0]:
        raise AssertionError("the same settings have two names")
    return judge(len(set(names)), right=4, wrong=1)
