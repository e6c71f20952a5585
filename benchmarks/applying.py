"""What ``apply()`` costs, with the whole catalogue on real TRL releases, and with made-up catalogues of many patches.

``python applying.py trainer LEAF ORDER`` and ``python applying.py made-up`` measure in a process of their own. The
parts are timed by functions around the engine's own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import measure
from measure import Finding, Result

TRAINERS = {
    "0.16.1": "trl.trainer.grpo_trainer",
    "0.29.1": "trl.trainer.grpo_trainer",
    "1.16.0": "trl.trainer.grpo_trainer",
}
ORDERS = ("unpatched", "before", "after")
"""No ``apply()``; before the trainer is imported; after it."""

COUNTED = ("gates", "fingerprints", "install")
IN_RANGE = ("sft-moe-aux-loss-times-gas", "grpo-kl-metric-token-level", "orpo-nan-gradient-near-certainty")
MADE_UP_ON = "1.14.2"
SIZES = (10, 100, 1_000, 10_000)


class Clock:
    """Times functions that call one another; each gets the time that none of the others within it has."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, list[float]] = defaultdict(list)
        self._within: list[float] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._within.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                self.seconds[name] += took - self._within.pop()
                self.calls[name].append(took)
                if self._within:
                    self._within[-1] += took

        return call

    @contextlib.contextmanager
    def collector(self) -> Iterator[None]:
        """Python's garbage collector gets a time of its own, wherever it strikes.

        It looks through all that torch and transformers have made, once in so many objects, whoever made the last.
        """

        def struck(phase: str, _: object) -> None:
            if phase == "start":
                self._within.append(0.0)
                began.append(time.perf_counter())
            else:
                self._within.pop()
                took = time.perf_counter() - began.pop()
                if self._within:  # not in what is no part of ``apply()``
                    self.seconds["collector"] += took
                    self._within[-1] += took

        began: list[float] = []
        gc.callbacks.append(struck)
        try:
            yield
        finally:
            gc.callbacks.remove(struck)

    def watch(self, name: str, owner: Any, attribute: str) -> None:
        setattr(owner, attribute, self.timed(name, getattr(owner, attribute)))


def watch(clock: Clock) -> None:
    """Time the parts of ``apply()``. The import of the package counts as a part."""
    engine = clock.timed("own imports", import_module)("trl_hotfix.patching.engine")
    application = import_module("trl_hotfix.patching.application")
    clock.watch("rest", engine.Engine, "apply")
    clock.watch("install", engine.Engine, "_imported")
    clock.watch("fingerprints", application, "_check_body")
    clock.watch("catalogue", engine.loading, "load")
    clock.watch("gates", engine.gates, "decisions")
    clock.watch("self-tests", application, "self_test")


def at_a_trainer(leaf: str, order: str) -> dict[str, Any]:
    """What importing one trainer and applying everything took, in ms."""
    clock = Clock()
    with clock.collector():
        if order == "before":
            watch(clock)
            import_module("trl_hotfix").apply()
        begin = time.perf_counter()
        import_module(leaf)
        imported = time.perf_counter() - begin
        if order == "after":
            watch(clock)
            import_module("trl_hotfix").apply()
    applied = []
    if order != "unpatched":
        applied = [each.id for each in import_module("trl_hotfix").status() if each.state.value == "applied"]
    told = {name: seconds * 1e3 for name, seconds in clock.seconds.items()}
    tests = [seconds * 1e3 for seconds in clock.calls["self-tests"]]
    return {"import_ms": imported * 1e3, "parts": told, "self_tests_ms": tests, "applied": applied}


def write_made_up(folder: Path, size: int) -> None:
    """A copy of the package whose catalogue has ``size`` patches, a module each: a few real ones, and made-up ones."""
    import yaml

    package = folder / "trl_hotfix"
    shutil.copytree(measure.CHECKOUT / "trl_hotfix", package, ignore=shutil.ignore_patterns("__pycache__"))
    entries = yaml.safe_load((measure.CHECKOUT / "patches.yaml").read_text(encoding="utf-8"))
    real = [each for each in entries if each["id"] in IN_RANGE]
    text = yaml.safe_dump(real, width=120, sort_keys=False)
    (model,) = (each for each in real if each["id"] == IN_RANGE[0])
    pattern = yaml.safe_dump([{**model, "id": "made-up-NUMBER", "trl": ">=99.0,<99.1"}], width=120, sort_keys=False)
    module = (package / "patches" / f"{model['id'].replace('-', '_')}.py").read_text(encoding="utf-8")
    for number in range(size - len(real)):
        text += pattern.replace("NUMBER", str(number))
        (package / "patches" / f"made_up_{number}.py").write_text(module, encoding="utf-8")
    (package / "patches.yaml").write_text(text, encoding="utf-8")


def with_made_up() -> dict[str, Any]:
    """What reading the catalogue took, and ``apply()`` with what was read, TRL not imported."""
    hotfix, catalogue = import_module("trl_hotfix"), import_module("trl_hotfix.catalogue.loading")
    import_module("trl_hotfix.patching.engine")
    begin = time.perf_counter()
    patches = catalogue.load()
    read = time.perf_counter()
    report = hotfix.apply()
    applied = time.perf_counter()
    pending = [each.id for each in report if each.state.value == "pending"]
    return {
        "read_ms": (read - begin) * 1e3,
        "apply_ms": (applied - read) * 1e3,
        "patches": len(patches),
        "pending": len(pending),
    }


def trainer_sample(release: str, leaf: str, order: str) -> dict[str, Any]:
    command = [measure.place(release).python, __file__, "trainer", leaf, order]
    return measure.process(command, measure.release_environment(release))


def made_up_sample(folder: Path) -> dict[str, Any]:
    made = measure.place(MADE_UP_ON)
    path = f"{made.overlay}:{folder}"
    command = [made.python, __file__, "made-up"]
    told = measure.process(command, measure.release_environment(MADE_UP_ON, PYTHONPATH=path))
    if told["pending"] != len(IN_RANGE):
        raise RuntimeError(f"{told['pending']} patches are in range, expected {len(IN_RANGE)}: {', '.join(IN_RANGE)}")
    return told


def _trainers(result: Result, *, quick: bool) -> None:
    for release, leaf in TRAINERS.items():
        variants = {order: functools.partial(trainer_sample, release, leaf, order) for order in ORDERS}
        done = measure.rounds(variants, 2 if quick else 7)
        result.samples[f"{release} {leaf}"] = measure.spread(done)
        for order in ORDERS[1:]:
            if not all(each[order]["applied"] for each in done):
                raise RuntimeError(f"no patch was applied to {release}, {leaf}")
            said = f"TRL {release}, apply() {order} the import"

            def shares(parts: Callable[[str], bool], order: str = order, done: Any = done) -> measure.Estimate:
                """Of the time that importing the trainer takes unpatched, in the same round."""
                return measure.estimate(
                    [
                        sum(ms for name, ms in each[order]["parts"].items() if parts(name))
                        / each["unpatched"]["import_ms"]
                        for each in done
                    ]
                )

            each_test = [statistics.median(each[order]["self_tests_ms"]) for each in done]
            worst = [max(each[order]["self_tests_ms"]) for each in done]
            result.findings += [
                Finding(f"{said}: gates, fingerprints, install / import", shares(COUNTED.__contains__), goal=0.02),
                Finding(f"{said}: all but the self-tests / import", shares(lambda name: name != "self-tests")),
                Finding(f"{said}: self-tests / import", shares(lambda name: name == "self-tests"), goal=0.10),
                Finding(f"{said}: a self-test, the median one", measure.estimate(each_test), "ms", 20.0),
                Finding(f"{said}: a self-test, the slowest", measure.estimate(worst), "ms"),
            ]


def _made_up(result: Result, *, quick: bool) -> None:
    sizes = SIZES[:3] if quick else SIZES
    folder = measure.fresh_folder("made-up")
    for size in sizes:
        write_made_up(folder / str(size), size)
    variants = {str(size): functools.partial(made_up_sample, folder / str(size)) for size in sizes}
    done = measure.rounds(variants, 2 if quick else 6)
    result.samples["made-up"] = measure.spread(done)
    shutil.rmtree(folder)
    smallest = str(sizes[0])
    for quantity, said in (("apply_ms", "apply(), catalogue read"), ("read_ms", "reading the catalogue")):
        for size in sizes[1:]:
            slopes = [(each[str(size)][quantity] - each[smallest][quantity]) / (size - sizes[0]) * 1e3 for each in done]
            what = f"{said}: per patch out of range, {sizes[0]} to {size:,} patches"
            result.findings.append(Finding(what, measure.estimate(slopes), "us"))


def run(*, quick: bool) -> Result:
    result = Result(versions={"trl": ", ".join([*TRAINERS, MADE_UP_ON])})
    _trainers(result, quick=quick)
    _made_up(result, quick=quick)
    return result


if __name__ == "__main__":
    print(json.dumps(with_made_up() if sys.argv[1] == "made-up" else at_a_trainer(*sys.argv[2:])))
