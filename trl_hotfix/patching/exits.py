"""Tell a ``SystemExit`` that a self-test raises itself from one that ends the program while the self-test runs.

A ``SystemExit`` is the self-test's own only if no signal handler has raised it (``signal_handlers``), and the code that
raised it belongs to the self-test, to trl_hotfix, or to TRL and the libraries below. Any other one ends the process:
to swallow it would keep a process alive that somebody ended, which is worse than to let a faulty self-test end one.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any

from .. import signal_handlers
from .libraries import TRL_AND_BELOW, folder_of

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_STANDARD_LIBRARY = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_SITE_PACKAGES = ("site-packages", "dist-packages")


def is_of_self_test(error: SystemExit, self_test: Callable[..., Any]) -> bool:
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if signal_handlers.has_raised(error):
        return False
    test = signal_handlers.code_of(self_test)
    # What the standard library raises, as argparse does, is of its caller.
    raised_in = next((code for code in reversed(codes) if not _is_of_standard_library(code)), None)
    if raised_in is None:
        return False
    if test is not None and raised_in.co_filename == test.co_filename:
        return True
    path = os.path.realpath(raised_in.co_filename)
    folders = (_PACKAGE, *map(folder_of, TRL_AND_BELOW))
    return any(path.startswith(folder + os.sep) for folder in folders if folder)


def _is_of_standard_library(code: CodeType) -> bool:
    path = os.path.realpath(code.co_filename)
    below = path.removeprefix(_STANDARD_LIBRARY)
    return code.co_filename.startswith("<frozen ") or (below != path and not below.startswith(_SITE_PACKAGES))
