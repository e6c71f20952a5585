"""Run many command lines of ``trl-hotfix``, each in a fork of one process, with little time and memory.

A new process for each takes a second, and a bound on memory would count what is imported. The cases come in a file, or
one after another as lines of the standard input, if ``-`` is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

SECONDS = 120
BYTES = 1 << 29
"""What a command may take on top of what it begins with: half a gigabyte."""


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Return the exit code of a command line, and what it printed."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if not child:
            for file, number in ((stdout, 1), (stderr, 2)):
                os.dup2(file.fileno(), number)
            os._exit(_run(case))
        _, status, usage = os.wait4(child, 0)
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read(1 << 20).decode("utf-8", errors="surrogateescape"))
    seconds = round(usage.ru_utime + usage.ru_stime, 2)
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "stdout": texts[0], "stderr": texts[1], "seconds": seconds, "kilobytes": usage.ru_maxrss}


def _run(case: dict[str, Any]) -> int:
    from trl_hotfix.commands.main import main

    # A command that waits is killed by the alarm. A busy machine may stand still for half a minute.
    signal.alarm(SECONDS)
    os.environ.update(case.get("environment", {}))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = case.get("bytes", BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + most,) * 2)
    if "cpu_seconds" in case:
        resource.setrlimit(resource.RLIMIT_CPU, (case["cpu_seconds"],) * 2)
    try:
        main(case["arguments"])
    except SystemExit as exit_:
        return int(exit_.code or 0)
    except BaseException:  # noqa: BLE001
        import traceback

        traceback.print_exc()
        return 99
    finally:
        # The streams of a process that has met its limit may be unusable.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
    return 98


def _import_all() -> None:
    """Import what the commands import, once."""
    from importlib import import_module

    from trl_hotfix.catalogue import loading
    from trl_hotfix.commands.main import NAMES
    from trl_hotfix.matching.fingerprints import bodies

    for name in NAMES:
        import_module(f"trl_hotfix.commands.{name}")
    loading.load()
    loading.without_repair()
    bodies()


if __name__ == "__main__":
    _import_all()
    if sys.argv[1] == "-":
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), flush=True)
        sys.exit()
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps([answer(case) for case in cases]))
