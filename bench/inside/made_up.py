"""Made-up patches on kinds of targets that the catalogue lacks: a step of the data, a static or a class method.

The bug is made up: the self-test returns ``reproduced`` and ``fixed`` in turn. The wrapper calls the wrapped function
and appends ``MARK`` to the token ids that it returns.
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
"""A token id that no word of the tiny tokenizer has."""
IDS = ("prompt_input_ids", "prompt_ids", "input_ids")


def declare(patch_id: str, module: str, attribute: str, *, traced: bool = False) -> Patch:
    """Add a patch of this target to the catalogue of this process."""
    target = Target(module, attribute, "mark", traced=traced)
    patch = Patch(patch_id, 3, "", Severity.WRONG_LOSS, ">=0.9.6", Upstream(), "", "", (target,), "self_test")
    verdicts = itertools.cycle([Verdict.REPRODUCED, Verdict.FIXED])
    home = ModuleType(modules.module_of(patch_id))
    home.mark, home.self_test = mark, lambda leaf: Outcome(next(verdicts))  # type: ignore[attr-defined]
    sys.modules[home.__name__] = home
    patches = (*loading.load(), patch)
    loading.load = lambda: patches  # type: ignore[assignment]
    return patch


def mark(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    for name in IDS:
        if isinstance(result, Mapping) and name in result:
            value = result[name]
            # The value is a batch up to 0.11, and a row later.
            result = {**result, name: [[*row, MARK] for row in value] if isinstance(value[0], list) else [*value, MARK]}
            break
    return result
