"""Measure the cost of a call of a patched method, beside a plain wrapt wrapper, a closure, and an edit by hand.

``python -m benchmarks.per_call VARIANT WORK`` measures one variant in a process of its own and prints nanoseconds of
CPU time per call. The wrapper only calls the original: the cost of more work depends on the patch.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from trl_hotfix.authoring import Call, wrapper

from benchmarks import measure
from benchmarks.measure import Finding, Result

CALLS = {"nothing": 200_000, "1 ms": 200}
NUMBERS = 60_000
"""The sum of so many numbers takes about 1 ms."""


def trainer_class(work: str) -> type:
    """Return a class with the method that is patched."""

    class Trainer:
        if work == "nothing":

            def step(self, batch: Any, scale: float = 1.0) -> Any:
                return batch

        else:

            def step(self, batch: Any, scale: float = 1.0) -> Any:
                sum(range(NUMBERS))
                return batch

    return Trainer


def passes_on(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapped(*args, **kwargs)


@wrapper
def makes_the_call(call: Call) -> Any:
    return call()


@wrapper
def reads_and_replaces(call: Call) -> Any:
    """Read two arguments and replace one."""
    return call.with_(scale=call["scale"] if call["batch"] is None else 3.0)()


def unpatched(owner: type) -> type:
    return owner


def ours(owner: type, by: Callable[..., Any] = makes_the_call) -> type:
    """Put the wrapper on as ``apply()`` does, and arm it. Under strict it is the same function."""
    from trl_hotfix.patching.sites import Site
    from trl_hotfix.patching.wrappers import Layer

    raw = vars(owner)["step"]
    layer = Layer("made-up", 1, by, traced=False)
    Site(owner, "step", raw, raw).put_on(layer)
    layer.armed = True
    return owner


def plain_wrapt(owner: type) -> type:
    import wrapt

    owner.step = wrapt.FunctionWrapper(owner.step, passes_on)  # type: ignore[attr-defined]
    return owner


def closure(owner: type) -> type:
    original = owner.step  # type: ignore[attr-defined]

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    owner.step = step  # type: ignore[attr-defined]
    return owner


def subclass(owner: type) -> type:
    class Edited(owner):  # type: ignore[misc, valid-type]
        def step(self, batch: Any, scale: float = 1.0) -> Any:
            return super().step(batch, scale=scale)

    return Edited


VARIANTS: dict[str, Callable[[type], type]] = {
    "unpatched": unpatched,
    "ours": ours,
    "ours, two reads and one replacement": functools.partial(ours, by=reads_and_replaces),
    "ours, wrapt's four arguments": functools.partial(ours, by=passes_on),
    "wrapt": plain_wrapt,
    "closure": closure,
    "subclass": subclass,
}


def time_per_call(variant: str, work: str, calls: int | None = None) -> float:
    """Return nanoseconds of CPU time per call. This includes the loop around the calls."""
    trainer = VARIANTS[variant](trainer_class(work))()
    batch, calls = object(), calls or CALLS[work]
    assert trainer.step(batch, scale=2.0) is batch
    repetitions = range(calls)
    begin = time.process_time_ns()
    for _ in repetitions:
        trainer.step(batch, scale=2.0)
    return (time.process_time_ns() - begin) / calls


def run(*, quick: bool) -> Result:
    environment = measure.bare_environment(PYTHONPATH=str(measure.CHECKOUT))
    result = Result()
    for work in CALLS:

        def sample(variant: str, work: str = work) -> dict[str, Any]:
            return measure.process([sys.executable, "-m", "benchmarks.per_call", variant, work], environment)

        variants = {variant: functools.partial(sample, variant) for variant in VARIANTS}
        rounds = measure.run_rounds(variants, 8 if quick else 60)
        result.samples[work] = measure.as_plain_data(rounds)
        for variant in VARIANTS:
            if variant == "unpatched":
                continue
            if work == "nothing":
                estimate = measure.difference(rounds, variant, "unpatched", "ns")
                result.findings.append(Finding(f"{variant}, more than unpatched, per call", estimate, "ns"))
            else:
                estimate = measure.ratio(rounds, variant, "unpatched", "ns")
                result.findings.append(Finding(f"{variant} / unpatched, 1 ms of work", estimate))
    from importlib.metadata import version

    result.versions["wrapt"] = version("wrapt")
    return result


if __name__ == "__main__":
    print(json.dumps({"ns": time_per_call(sys.argv[1], sys.argv[2])}))
