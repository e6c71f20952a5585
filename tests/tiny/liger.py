"""Stand-ins for the Liger kernel, an optional package that the stacks lack.

What it puts into a model computes the same numbers as the model, so names alone are installed: what transformers asks
of it does nothing to the model.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock


@contextmanager
def names_of_liger(*modules: str) -> Iterator[None]:
    """Have ``use_liger_kernel=True`` accepted inside the block by transformers, and by these modules of TRL."""
    kernel: Any = types.ModuleType("liger_kernel.transformers")
    kernel._apply_liger_kernel_to_instance = lambda **settings: None
    with ExitStack() as stack:
        # mock.patch.dict would take out what is imported inside the block, too.
        for name in (kernel.__name__.partition(".")[0], kernel.__name__):
            sys.modules[name] = kernel
            stack.callback(sys.modules.pop, name)
        for module in (*modules, "transformers.trainer", "transformers.integrations.liger"):
            with suppress(ImportError):  # the last one is a part of later releases of transformers
                if hasattr(importlib.import_module(module), "is_liger_kernel_available"):
                    stack.enter_context(mock.patch(f"{module}.is_liger_kernel_available", return_value=True))
        yield
