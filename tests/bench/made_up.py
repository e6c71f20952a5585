"""Patches that no catalogue has, on kinds of targets that it has none of: a step of the data, a static or class method.

Their bug is made up: the self-test says ``reproduced`` and ``fixed`` in turn. Their wrapper goes through, and puts
``MARK`` at the end of what a tokenizing function returns.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from trl_hotfix.catalogue import loading, modules
from trl_hotfix.model import Outcome, Patch, Severity, Target, Upstream, Verdict

MARK = 63
"""No word of the tiny tokenizer has this number."""
IDS = ("prompt_input_ids", "prompt_ids", "input_ids")


def declare(patch_id: str, module: str, attribute: str, *, traced: bool = False) -> Patch:
    """Have a patch of this target in the catalogue of this process, beside those that are there."""
    target = Target(module, attribute, "mark", traced=traced)
    patch = Patch(patch_id, 3, "", Severity.WRONG_LOSS, ">=0.9.6", Upstream(), "", "", (target,), "self_test")
    verdicts = itertools.cycle([Verdict.REPRODUCED, Verdict.FIXED])
    home = ModuleType(modules.module_of(patch_id))
    home.mark, home.self_test = mark, lambda leaf: Outcome(next(verdicts))  # type: ignore[attr-defined]
    sys.modules[home.__name__] = home
    every = (*loading.load(), patch)
    loading.load = lambda: every  # type: ignore[assignment]
    return patch


def mark(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    found = wrapped(*args, **kwargs)
    for name in IDS:
        if isinstance(found, Mapping) and name in found:
            value = found[name]
            # Up to 0.11 a batch, later a row.
            found = {**found, name: [[*row, MARK] for row in value] if isinstance(value[0], list) else [*value, MARK]}
            break
    return found
