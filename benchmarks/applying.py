"""Measure the cost of ``apply()``: the whole catalogue on real TRL releases, and made-up catalogues of many patches.

``python -m benchmarks.applying trainer MODULE ORDER`` and ``python -m benchmarks.applying made-up`` measure in a
process of their own. The parts are timed by functions around those of the engine.
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

from benchmarks import measure
from benchmarks.measure import Finding, Result

TRAINERS = {
    "0.16.1": "trl.trainer.grpo_trainer",
    "0.29.1": "trl.trainer.grpo_trainer",
    "1.16.0": "trl.trainer.grpo_trainer",
}
ORDERS = ("unpatched", "before", "after")
"""``apply()`` is not called, called before the trainer is imported, or called after it."""

COUNTED = ("gates", "fingerprints", "install")
IN_RANGE = ("sft-moe-aux-loss-times-gas", "grpo-kl-metric-token-level", "orpo-nan-gradient-near-certainty")
MADE_UP_ON = "1.14.2"
SIZES = (10, 100, 1_000, 10_000)


class Clock:
    """Time functions that call one another. A function's time does not include that of timed functions within it."""

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
        """Time Python's garbage collector by itself, wherever it runs.

        After a number of new objects it visits all objects of torch and transformers, whichever code made the new ones.
        """

        def collected(phase: str, _: object) -> None:
            if phase == "start":
                self._within.append(0.0)
                starts.append(time.perf_counter())
            else:
                self._within.pop()
                took = time.perf_counter() - starts.pop()
                if self._within:  # Outside ``apply()`` the collector is not counted.
                    self.seconds["collector"] += took
                    self._within[-1] += took

        starts: list[float] = []
        gc.callbacks.append(collected)
        try:
            yield
        finally:
            gc.callbacks.remove(collected)

    def watch(self, name: str, owner: Any, attribute: str) -> None:
        setattr(owner, attribute, self.timed(name, getattr(owner, attribute)))


def watch(clock: Clock) -> None:
    """Time the parts of ``apply()``. The import of the package is one of them."""
    engine = clock.timed("own imports", import_module)("trl_hotfix.patching.engine")
    application = import_module("trl_hotfix.patching.application")
    clock.watch("rest", engine.Engine, "apply")
    clock.watch("install", engine.Engine, "_imported")
    clock.watch("fingerprints", application, "_check_body")
    clock.watch("catalogue", engine.loading, "load")
    clock.watch("gates", engine.gates, "decisions")
    clock.watch("patch modules", application.modules, "function_of")
    clock.watch("self-tests", application, "self_test")


def at_a_trainer(module: str, order: str) -> dict[str, Any]:
    """Return the time of importing the trainer's module and of the parts of ``apply()``, in ms."""
    clock = Clock()
    with clock.collector():
        begin = time.perf_counter()
        import_module("torch")
        imported = time.perf_counter() - begin
        # Every training imports it, when accelerate prepares the model. It is nobody's time, whichever comes first.
        import_module("torch._dynamo")
        if order == "before":
            watch(clock)
            import_module("trl_hotfix").apply()
        begin = time.perf_counter()
        import_module(module)
        imported += time.perf_counter() - begin
        if order == "after":
            watch(clock)
            import_module("trl_hotfix").apply()
    applied = []
    if order != "unpatched":
        applied = [status.id for status in import_module("trl_hotfix").status() if status.state.value == "applied"]
    parts = {name: seconds * 1e3 for name, seconds in clock.seconds.items()}
    tests = [seconds * 1e3 for seconds in clock.calls["self-tests"]]
    return {"import_ms": imported * 1e3, "parts": parts, "self_tests_ms": tests, "applied": applied}


def write_made_up(folder: Path, size: int) -> None:
    """Write an installed package with ``size`` patches in its catalogue, a few real ones and made-up ones."""
    package = folder / "trl_hotfix"
    shutil.copytree(installed_package() / "trl_hotfix", package)
    catalogue = package / "data" / "patches.json"
    real = [entry for entry in json.loads(catalogue.read_text(encoding="utf-8")) if entry["id"] in IN_RANGE]
    (template,) = (entry for entry in real if entry["id"] == IN_RANGE[0])
    made_up = [{**template, "id": f"made-up-{number}", "trl": ">=99.0,<99.1"} for number in range(size - len(real))]
    (module,) = package.glob(f"patches/*/{template['id'].replace('-', '_')}.py")
    for entry in made_up:
        shutil.copy(module, module.with_name(f"{entry['id'].replace('-', '_')}.py"))
    catalogue.write_text(json.dumps([*real, *made_up]), encoding="utf-8")


def with_made_up() -> dict[str, Any]:
    """Return the time of reading the catalogue, and of ``apply()`` after that, in ms. TRL is not imported."""
    hotfix, catalogue = import_module("trl_hotfix"), import_module("trl_hotfix.catalogue.loading")
    import_module("trl_hotfix.patching.engine")
    begin = time.perf_counter()
    patches = catalogue.load()
    read = time.perf_counter()
    report = hotfix.apply()
    applied = time.perf_counter()
    pending = [status.id for status in report if status.state.value == "pending"]
    return {
        "read_ms": (read - begin) * 1e3,
        "apply_ms": (applied - read) * 1e3,
        "patches": len(patches),
        "pending": len(pending),
    }


APPLYING = ("-m", "benchmarks.applying")


def trainer_sample(release: str, module: str, order: str) -> dict[str, Any]:
    return run_beside(release, installed_package(), *APPLYING, "trainer", module, order)


def run_beside(release: str, package: Path, *arguments: str) -> dict[str, Any]:
    """Run the Python of this release with the folder ``package`` beside TRL, as ``measure.process`` does."""
    place = measure.place(release)
    environment = measure.release_environment(release, PYTHONPATH=f"{place.overlay}:{package}:{measure.CHECKOUT}")
    return measure.process([place.python, *arguments], environment)


@functools.cache
def installed_package() -> Path:
    """Install the package as users have it. A checkout would read the evidence of each patch."""
    return measure.installed(measure.CHECKOUT, "installed")


def made_up_sample(folder: Path) -> dict[str, Any]:
    sample = run_beside(MADE_UP_ON, folder, *APPLYING, "made-up")
    if sample["pending"] != len(IN_RANGE):
        raise RuntimeError(f"{sample['pending']} patches are in range, expected {len(IN_RANGE)}: {', '.join(IN_RANGE)}")
    return sample


def _trainers(result: Result, *, quick: bool) -> None:
    for release, module in TRAINERS.items():
        variants = {order: functools.partial(trainer_sample, release, module, order) for order in ORDERS}
        rounds = measure.run_rounds(variants, 2 if quick else 7)
        result.samples[f"{release} {module}"] = measure.as_plain_data(rounds)
        for order in ORDERS[1:]:
            if not all(samples[order]["applied"] for samples in rounds):
                raise RuntimeError(f"no patch was applied to {release}, {module}")
            case = f"TRL {release}, apply() {order} the import"

            def share(
                is_counted: Callable[[str], bool], order: str = order, rounds: list[measure.Round] = rounds
            ) -> measure.Estimate:
                """Return the parts' share of the time of the unpatched import in the same round."""
                return measure.estimate(
                    [
                        sum(ms for name, ms in samples[order]["parts"].items() if is_counted(name))
                        / samples["unpatched"]["import_ms"]
                        for samples in rounds
                    ]
                )

            typical = [statistics.median(samples[order]["self_tests_ms"]) for samples in rounds]
            slowest = [max(samples[order]["self_tests_ms"]) for samples in rounds]
            result.findings += [
                Finding(f"{case}: gates, fingerprints, install / import", share(COUNTED.__contains__), goal=0.02),
                Finding(f"{case}: all but the self-tests / import", share(lambda name: name != "self-tests")),
                Finding(f"{case}: self-tests / import", share(lambda name: name == "self-tests")),
                Finding(f"{case}: a self-test, the median one", measure.estimate(typical), "ms", 1.5),
                Finding(f"{case}: a self-test, the slowest", measure.estimate(slowest), "ms", 15.0),
            ]


def _made_up(result: Result, *, quick: bool) -> None:
    sizes = SIZES[:3] if quick else SIZES
    folder = measure.fresh_folder("made-up")
    for size in sizes:
        write_made_up(folder / str(size), size)
    variants = {str(size): functools.partial(made_up_sample, folder / str(size)) for size in sizes}
    rounds = measure.run_rounds(variants, 2 if quick else 6)
    result.samples["made-up"] = measure.as_plain_data(rounds)
    shutil.rmtree(folder)
    smallest = str(sizes[0])
    for quantity, activity in (("apply_ms", "apply(), catalogue read"), ("read_ms", "reading the catalogue")):
        for size in sizes[1:]:
            slopes = [
                (samples[str(size)][quantity] - samples[smallest][quantity]) / (size - sizes[0]) * 1e3
                for samples in rounds
            ]
            label = f"{activity}: per patch out of range, {sizes[0]} to {size:,} patches"
            result.findings.append(Finding(label, measure.estimate(slopes), "us"))


def run(*, quick: bool) -> Result:
    result = Result(versions={"trl": ", ".join([*TRAINERS, MADE_UP_ON])})
    _trainers(result, quick=quick)
    _made_up(result, quick=quick)
    return result


if __name__ == "__main__":
    print(json.dumps(with_made_up() if sys.argv[1] == "made-up" else at_a_trainer(*sys.argv[2:])))
