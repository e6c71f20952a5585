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
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported, default_arguments, single_process, stub_trainer


@wrapper
def name_the_file_by_what_it_depends_on(call: Call) -> Any:
    """Add to the dataset's fingerprint the settings by which the log-probs are computed."""
    from datasets.fingerprint import Hasher

    trainer, dataset = call.trainer, call["dataset"]
    truncation = [
        getattr(owner, name, None)
        for owner in (trainer.args, trainer.data_collator)
        for name in ("max_length", "truncation_mode")
    ]
    # A stream has no fingerprint, and is refused by the method itself. KTO has no ld_alpha.
    data, ld_alpha = getattr(dataset, "_fingerprint", None), getattr(trainer, "ld_alpha", None)
    with shadowed(dataset, "_fingerprint", Hasher.hash((data, *map(str, truncation), str(ld_alpha)))):
        return call()


def files_of_other_settings_have_other_names(module: ModuleType) -> Outcome:
    """Count the names of the files for a max_length of 12 and of 64. There are two, and one with the bug."""
    import torch

    method = "KTO" if "kto" in module.__name__ else "DPO"
    trainer_class = getattr(module, f"{method}Trainer")
    precompute = inspect.unwrap(trainer_class._precompute_ref_logps)
    if reexported := absent_if_reexported(module, precompute):
        return reexported
    if "_fingerprint" not in precompute.__code__.co_names:
        return absent("what is precomputed is not kept in a file")
    if method == "KTO" and "filter" in inspect.unwrap(trainer_class._prepare_dataset).__code__.co_names:
        return absent("the dataset is filtered by max_length, so its own fingerprint depends on all arguments")
    names: set[str] = set()

    class FileNamed(Exception):
        pass

    def end(fingerprint: str) -> str:
        names.add(fingerprint)
        raise FileNamed

    attributes = {"model": torch.nn.Module(), "ref_model": None, "data_collator": None, "calculate_KL": True}
    for max_length in (12, 64):
        arguments = default_arguments(getattr(module, f"{method}Config"), max_length=max_length)
        trainer = stub_trainer(trainer_class, arguments, _precompute_model_hash="", **attributes)
        with single_process(module), suppress(FileNamed):
            trainer._precompute_ref_logps(SimpleNamespace(_fingerprint="", _get_cache_file_path=end), "train", 1)
    return judge(len(names), right=2, wrong=1)
