"""The garbage collector waits while patches go on, and is afterwards as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import trl_hotfix
from trl_hotfix.model import State
from trl_hotfix.patching import collector

from helpers.made_up_patches import is_marked, mark


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_waits_while_a_patch_goes_on(declare: Any) -> None:
    seen = []

    def self_test(module: Any) -> Any:
        seen.append(gc.isenabled())
        return is_marked(module)

    declare(self_test, mark)
    assert trl_hotfix.apply()["made-up"].state is State.APPLIED
    assert seen == [False, False]
    assert gc.isenabled()


def test_it_runs_again_after_an_error_and_after_an_inner_pause() -> None:
    @collector.paused()
    def interrupted() -> None:
        with collector.paused():
            pass
        assert not gc.isenabled()
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert gc.isenabled()


def test_one_that_is_off_stays_off(declare: Any) -> None:
    declare(is_marked, mark)
    gc.disable()
    trl_hotfix.apply()
    assert not gc.isenabled()


OWN_IMPORTS = """
import gc, sys

seen = []

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("trl_hotfix.api", "trl_hotfix.patching.engine", "msgspec"):
            seen.append((name, gc.isenabled()))

sys.meta_path.insert(0, Finder)
{start}
print(*sorted(seen), gc.isenabled())
"""


@pytest.mark.parametrize(
    "start", ["from trl_hotfix import apply", "from trl_hotfix.autostart import apply_now; apply_now()"]
)
def test_it_waits_while_our_own_modules_are_imported(start: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", OWN_IMPORTS.format(start=start)], capture_output=True, text=True, check=False
    )
    names = "msgspec", "trl_hotfix.api", "trl_hotfix.patching.engine"
    assert process.stdout == f"{' '.join(str((name, False)) for name in names)} True\n", process.stderr


FORK = """
import gc, os, threading
from trl_hotfix.patching import collector, engine

begun, ended = threading.Event(), threading.Event()

def pause():
    with collector.paused():
        begun.set()
        ended.wait()

def forked():
    child = os.fork()
    if not child:
        os._exit(gc.isenabled())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

thread = threading.Thread(target=pause)
thread.start()
begun.wait()
of_another_thread = forked()
ended.set()
thread.join()
with collector.paused():
    print(of_another_thread, forked(), gc.isenabled())
print(gc.isenabled())
"""


def test_a_child_does_not_inherit_the_pause_of_a_thread_that_it_lacks() -> None:
    process = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False)
    assert process.stdout == "1 0 False\nTrue\n", process.stderr
