"""The statistics of the benchmarks, and that each variant is what its name says. No test depends on a clock."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import json
import random
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import (
    applying,
    cost_cases,
    costs,
    gain,
    listing,
    measure,
    own_code,
    per_call,
    plot,
    run,
    start,
    training,
)
from benchmarks.measure import Estimate, Finding

# What is measured is a run with torch, and a wheel that the developers' tools build.
pytestmark = pytest.mark.needs_trl

# Statistics


def test_each_round_has_every_variant_once_in_random_order() -> None:
    taken: list[str] = []

    def variant(name: str) -> Any:
        def sample() -> dict[str, float]:
            taken.append(name)
            return {"at": float(len(taken))}

        return sample

    rounds = measure.run_rounds({name: variant(name) for name in "abc"}, 30)
    assert len(rounds) == 30
    orders = [tuple(taken[at : at + 3]) for at in range(0, len(taken), 3)]
    assert len(orders) == 31  # the first warms up and is discarded
    assert {tuple(sorted(order)) for order in orders} == {("a", "b", "c")}
    assert len(set(orders)) == 6
    assert min(order["a"]["at"] for order in rounds) > 3


def test_the_interval_agrees_with_published_tables() -> None:
    # n = 10: the 2nd and the 9th value enclose the median with 97.9 %, n = 20: the 6th and the 15th with 95.9 %.
    for n, low, high, coverage in ((10, 2, 9, 0.979), (20, 6, 15, 0.959), (6, 1, 6, 0.969)):
        values = list(range(1, n + 1))
        random.Random(n).shuffle(values)
        estimate = measure.estimate(values)
        assert (estimate.low, estimate.high, estimate.n) == (low, high, n)
        assert estimate.coverage == pytest.approx(coverage, abs=5e-4)
        assert estimate.median == statistics.median(values)


def test_the_interval_of_few_values_is_their_range() -> None:
    assert measure.estimate([3.0, 1.0]) == Estimate(2.0, 1.0, 3.0, 2, 0.5)
    assert measure.estimate([3.0]) == Estimate(3.0, 3.0, 3.0, 1, 0.0)
    with pytest.raises(ValueError, match="at least one value"):
        measure.estimate([])


def test_the_interval_covers_the_median_as_often_as_stated() -> None:
    draw = random.Random(0)
    had = Counter(
        estimate.low <= 0.0 <= estimate.high
        for estimate in (measure.estimate([draw.gauss(0, 1) ** 3 for _ in range(25)]) for _ in range(2000))
    )
    assert had[True] / had.total() == pytest.approx(measure.estimate(range(25)).coverage, abs=0.02)


def test_differences_and_ratios_are_within_a_round() -> None:
    # The machine gets ten times slower from round to round, and the ratio stays the same.
    rounds = [{"a": {"ms": 10.0**n}, "b": {"ms": 2 * 10.0**n}} for n in range(7)]
    assert measure.ratio(rounds, "b", "a", "ms") == Estimate(2.0, 2.0, 2.0, 7, measure.estimate(range(7)).coverage)
    assert measure.difference(rounds, "b", "a", "ms").median == 1000.0


@pytest.mark.parametrize(
    ("low", "high", "goal", "verdict"),
    [(0, 1, 1, "met"), (2, 3, 1, "not met"), (0.5, 2, 1, "undecided"), (0, 9, None, "")],
)
def test_a_goal_is_met_only_if_the_whole_interval_is(low: float, high: float, goal: float | None, verdict: str) -> None:
    assert Finding("it", Estimate((low + high) / 2, low, high, 9, 0.95), "ms", goal).verdict == verdict


def test_too_few_rounds_decide_nothing() -> None:
    assert Finding("it", measure.estimate([1.0, 1.0]), "ms", 2.0).verdict == "undecided"
    assert Finding("it", measure.exact(1.0), "", 2.0).verdict == "met"


def test_a_failed_process_is_an_error_with_its_output() -> None:
    code = "import sys; print('no such luck'); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3.*no such luck"):
        measure.process([sys.executable, "-c", code], measure.bare_environment())


def test_a_process_is_timed_and_its_last_line_is_read() -> None:
    code = "print('hello'); print('{\"answer\": 42}')"
    record = measure.process([sys.executable, "-c", code], measure.bare_environment())
    assert record["answer"] == 42
    assert record["wall_ms"] > 0
    assert record["cpu_ms"] > 0


# The results


def results(**fields: Any) -> dict[str, Any]:
    finding = {"what": "a <b>", "unit": "ms", "median": 2.0, "low": 1.0, "high": 3.0, "n": 9, "coverage": 0.96}
    record = {**finding, "goal": 1.5, "verdict": "undecided", **fields}
    return {"start": {"quick": False, "findings": [record, {**record, "what": "c", "goal": None, "verdict": ""}]}}


def test_the_picture_is_stable_xml_with_every_figure() -> None:
    drawn = plot.svg(results())
    root = ElementTree.fromstring(drawn)
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["a <b>: 2 [1, 3], goal 1.5: undecided", "c: 2 [1, 3]"]
    assert plot.svg(results()) == drawn


def test_the_results_have_machine_versions_and_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Fake:
        @staticmethod
        def run(*, quick: bool) -> measure.Result:
            found = [Finding("it", measure.exact(1.23456789), "ms", 2.0)]
            samples = {"rounds": [{"a": {"ms": 1.0}}]}
            return measure.Result(found, samples, {"coverage": "1"}, {"a patch": 2.0})

    monkeypatch.setitem(run.BENCHMARKS, "start", Fake)
    for _ in range(2):
        run.main.main(["start", "--quick", "--out", str(tmp_path)], standalone_mode=False)
    benchmarks = json.loads((tmp_path / "results.json").read_text())["benchmarks"]
    assert list(benchmarks) == ["start"]
    record = benchmarks["start"]
    assert {"processor", "cores", "memory_gib", "system", "python", "load_before"} == record["machine"].keys()
    assert record["versions"].keys() == {"trl_hotfix", "commit", "coverage"}
    assert record["date"].startswith("20")
    assert record["quick"] is True
    assert record["command"] == "python -m benchmarks.run --quick start"
    assert record["summary"] == {"a patch": 2.0}
    assert [(row["what"], row["median"], row["verdict"]) for row in record["findings"]] == [("it", 1.23457, "met")]
    assert "samples" not in record
    samples = json.loads((tmp_path / "samples.json").read_text())["benchmarks"]
    assert samples == {"start": {"rounds": [{"a": {"ms": 1.0}}]}}
    assert (tmp_path / "results.svg").is_file()


def test_the_results_on_record_have_no_samples() -> None:
    text = (measure.CHECKOUT / "benchmarks" / "results.json").read_text(encoding="utf-8")
    assert not any("samples" in record for record in json.loads(text)["benchmarks"].values())
    assert len(text) < 150_000


# The variants


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> start.Start:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "WORK", tmp_path_factory.mktemp("benchmarks"))
        return start.Start(start.own_variants())


@pytest.mark.parametrize("name", start.own_variants())
def test_each_start_matches_its_name(starts: start.Start, name: str) -> None:
    starts.check(name)
    assert starts.run(name)["wall_ms"] > 0


@pytest.mark.parametrize(
    ("name", "actual"), [("=1", "unset"), ("unset", "=1"), ("nothing", "unset"), ("unset", "nothing")]
)
def test_a_start_that_does_not_match_its_name_is_refused(
    starts: start.Start, monkeypatch: pytest.MonkeyPatch, name: str, actual: str
) -> None:
    proof = start.own_variants()[name].proof
    monkeypatch.setitem(starts.variants, name, dataclasses.replace(starts.variants[actual], proof=proof))
    with pytest.raises(RuntimeError, match="ended with 1"):
        starts.check(name)


def test_the_measured_list_imports_nothing_heavy() -> None:
    assert listing.imported() == []


@pytest.mark.parametrize("work", per_call.CALLS)
@pytest.mark.parametrize("variant", per_call.VARIANTS)
def test_each_variant_of_a_call_returns_the_same(variant: str, work: str) -> None:
    assert per_call.time_per_call(variant, work, calls=2) > 0


def test_each_variant_of_a_call_matches_its_name() -> None:
    import wrapt

    from trl_hotfix.patching.wrappers import reference_of

    owners = {name: put_on(per_call.trainer_class("nothing")) for name, put_on in per_call.VARIANTS.items()}
    step = {name: vars(owner)["step"] for name, owner in owners.items()}
    ours = {
        "ours": per_call.makes_the_call,
        "ours, two reads and one replacement": per_call.reads_and_replaces,
        "ours, wrapt's four arguments": per_call.passes_on,
    }
    assert {name for name, method in step.items() if reference_of(method)} == ours.keys()
    for name, wrapper in ours.items():
        closure = inspect.getclosurevars(step[name]).nonlocals
        assert closure["wrapper"] is wrapper
        assert closure["layer"].armed
    assert type(step["wrapt"]) is wrapt.FunctionWrapper
    plain = {name for name, method in step.items() if type(method) is type(per_call.time_per_call)}
    assert plain == {"unpatched", *ours, "closure", "subclass"}
    assert owners["subclass"].__mro__[1].__name__ == "Trainer"


def at_the_trainer(order: str) -> dict[str, Any]:
    environment = measure.bare_environment(PYTHONPATH=str(measure.CHECKOUT), HF_HUB_OFFLINE="1")
    command = [sys.executable, "-m", "benchmarks.applying", "trainer", "trl.trainer.dpo_trainer", order]
    return measure.process(command, environment)


def test_a_clock_gives_each_function_its_own_time() -> None:
    clock = applying.Clock()
    inner = clock.timed("inner", lambda: sum(range(1000)))
    clock.timed("outer", lambda: [inner() for _ in range(3)])()
    ((total,), inside) = clock.calls["outer"], clock.calls["inner"]
    assert len(inside) == 3
    assert clock.seconds["inner"] == pytest.approx(sum(inside))
    assert sum(clock.seconds.values()) == pytest.approx(total)


def test_a_clock_gives_the_collector_its_own_time() -> None:
    clock = applying.Clock()
    with clock.collector():
        gc.collect()
        assert clock.seconds == {}
        clock.timed("part", gc.collect)()
    gc.collect()
    ((total,),) = clock.calls.values()
    assert clock.seconds.keys() == {"part", "collector"}
    assert 0 < clock.seconds["part"] < clock.seconds["collector"]
    assert sum(clock.seconds.values()) == pytest.approx(total)


@pytest.mark.matrix
def test_apply_on_a_real_trainer_has_every_part() -> None:
    unpatched = at_the_trainer("unpatched")
    assert (unpatched["parts"], unpatched["applied"]) == ({}, [])
    parts = {"own imports", "rest", "install", "fingerprints", "catalogue", "gates", "patch modules", "self-tests"}
    for order in ("before", "after"):
        told = at_the_trainer(order)
        assert told["parts"].keys() - {"collector"} == parts
        assert "moe-aux-loss-lost-under-deepspeed" in told["applied"]
        # Two runs, red and green, for each applied patch.
        assert len(told["self_tests_ms"]) >= 2 * len(told["applied"])


def test_a_made_up_catalogue_has_few_patches_in_range(tmp_path: Path) -> None:
    applying.write_made_up(tmp_path, 10)
    overlay = tmp_path / "overlay" / f"trl-{applying.MADE_UP_ON}.dist-info"
    overlay.mkdir(parents=True)
    (overlay / "METADATA").write_text(f"Name: trl\nVersion: {applying.MADE_UP_ON}\n")
    code = [sys.executable, "-m", "benchmarks.applying", "made-up"]
    environment = measure.bare_environment(PYTHONPATH=f"{overlay.parent}:{tmp_path}:{measure.CHECKOUT}")
    # Not in the checkout, whose package would be the first on the path.
    process = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    counts = json.loads(process.stdout)
    assert (counts["patches"], counts["pending"]) == (10, len(applying.IN_RANGE))


@pytest.mark.matrix
def test_steps_of_a_tiny_model_match_the_fixed_release() -> None:
    rounds = training.sample("eager", 2, 3, training.RELEASES, hidden=16)
    training.check(rounds)
    assert len(rounds) == 2
    for sample in (sample for samples in rounds for sample in samples.values()):
        assert len(sample["step_ms"]) == len(sample["step_cpu_ms"]) == 3
        assert min(sample["step_ms"]) > 0
        assert sample["peak_mib"] > 0


def test_trainings_take_turns_and_an_error_in_one_is_raised() -> None:
    steps: list[str] = []

    def train(name: str, runner: training.Runner) -> dict[str, Any]:
        for _ in range(2):
            runner.step_begins()
            steps.append(name)
            runner.step_ends()
        if name == "b":
            raise ValueError("no more")
        return {"losses": [1.0]}

    runners = {name: training.Runner(functools.partial(train, name)) for name in "ab"}
    for name in "abab":
        runners[name].turn()
    assert steps == ["a", "b"]
    runners["a"].turn()
    assert runners["a"].results["losses"] == [1.0]
    assert len(runners["a"].results["step_ms"]) == 2
    with pytest.raises(ValueError, match="no more"):
        runners["b"].turn()


def test_steps_are_compared_one_by_one() -> None:
    # The machine is twice as slow from the second step on, and the slower mode takes 1.1 times as long.
    slower, faster = [1.1, 2.2, 2.2, 2.2], [1.0, 2.0, 2.0, 2.0]
    rounds = [{"one": {"ms": slower}, "other": {"ms": faster}}, {"one": {"ms": faster}, "other": {"ms": faster}}]
    ratio = measure.ratio_of_steps(rounds, "one", "other", "ms")
    assert (ratio.low, ratio.high, ratio.n) == (1.0, pytest.approx(1.1), 2)


@pytest.mark.parametrize("wrong", ["patched", "unpatched"])
def test_steps_that_do_not_match_their_name_are_refused(wrong: str) -> None:
    right = {"unpatched": 2.0, "patched": 1.0, "fixed": 1.0}
    losses = dict(right)
    losses[wrong] = losses["fixed"] if wrong == "unpatched" else losses["unpatched"]
    with pytest.raises(RuntimeError, match="step 2: the losses are"):
        training.check([{mode: {"losses": [right[mode], losses[mode]]} for mode in right}])


@pytest.mark.matrix
def test_the_gain_is_one_reference_forward_per_step() -> None:
    patch_id = "dpo-precomputed-ref-logps-dropped"
    samples = {mode: gain.sample(patch_id, mode, hidden=16) for mode in gain.MODES}
    gain.check([samples])
    forwards = {mode: sample["reference_forwards"] for mode, sample in samples.items()}
    assert forwards == {"unpatched": 1, "patched": 0, "fixed": 0, "instead": 1}
    assert [mode for mode, sample in samples.items() if sample["reference_mib"] > 0] == ["instead"]


# The costs of the patches


def test_our_code_ends_where_it_calls_trl_and_begins_where_trl_calls_a_view() -> None:
    clock = own_code.Clock()
    whose: list[tuple[str, bool]] = []

    def view() -> None:
        whose.append(("view", clock.is_ours))

    def method() -> None:
        whose.append(("method", clock.is_ours))
        timed_view()

    def helper() -> None:
        whose.append(("helper", clock.is_ours))

    def wrapper() -> None:
        timed_helper()
        timed_method()
        whose.append(("wrapper", clock.is_ours))

    timed_view, timed_helper, timed_method = clock.ours(view), clock.ours(helper), clock.theirs(method)
    clock.ours(wrapper, "Trainer.step")()
    assert whose == [("helper", True), ("method", False), ("view", True), ("wrapper", True)]
    assert not clock.is_ours
    # The helper is called by our own code, and so belongs to the span of the wrapper.
    assert [(span.name.rpartition(".")[2], span.is_target) for span in clock.spans] == [("view", False), ("step", True)]


def test_the_clock_is_right_after_an_error() -> None:
    clock = own_code.Clock()

    def fail() -> None:
        raise ValueError("it fails")

    for function in (clock.ours(clock.theirs(fail)), clock.ours(fail)):
        with pytest.raises(ValueError, match="it fails"):
            function()
        assert not clock.is_ours
    assert len(clock.spans) == 2


def test_every_function_of_a_module_of_ours_is_timed_but_generators() -> None:
    source = "def outer():\n def inner(): pass\n return inner, lambda: 0\ndef generator():\n yield 1\n"
    source += "class View:\n def __call__(self): pass\n"
    names: list[str] = []

    def mark(function: Any) -> Any:
        names.append(function.__name__)
        return function

    namespace: dict[str, Any] = {own_code.MARK: mark, "__name__": "made_up"}
    exec(own_code.marked(source, "made_up.py"), namespace)
    assert names == ["outer", "__call__"]
    namespace["outer"]()
    assert names[2:] == ["inner", "<lambda>"]


def test_a_case_counts_the_memory_of_our_code_alone() -> None:
    code = (
        "import importlib, json\nfrom benchmarks import own_code\nown_code.install()\n"
        "from benchmarks import cost_cases\n"
        "patch = importlib.import_module('trl_hotfix.patches.online.online_dpo_metrics_include_padding')\n"
        "size = cost_cases.Size(patch, 100_000, None, None)\n"
        "call = cost_cases.CASES['online-dpo-metrics-include-padding'](size)\n"
        "print(json.dumps(cost_cases.of_one_call(call)))"
    )
    environment = measure.bare_environment(PYTHONPATH=str(measure.CHECKOUT))
    counts = measure.process([sys.executable, "-c", code], environment)
    # ``mask == 0`` has a byte for each token, and what is filled four.
    assert (counts["operations"], counts["peak"], counts["bytes"]) == (2, 500_000, 500_000)
    assert counts["seconds"] > 0


def test_large_tensors_of_a_case_are_not_made() -> None:
    import torch

    memory = own_code.Memory()

    def square() -> Any:
        column = torch.arange(300_000)
        return (column[:, None] == column[None, :]).float().sum()

    with own_code.counted_tensors(memory):
        assert own_code.CLOCK.ours(square)().is_meta
    elements = 300_000**2
    assert memory.peak >= 5 * elements
    assert memory.now < elements


def test_every_case_is_of_a_patch() -> None:
    assert cost_cases.CASES.keys() | cost_cases.NOT_ON_A_GPU.keys() <= {patch.id for patch in costs.patches()}


def span(name: str, phase: str = own_code.STEPS, micro_batch: int = 2, seconds: float = 1.0, **fields: Any) -> Any:
    fields = {"is_target": True, "seconds": seconds, **fields}
    return dataclasses.asdict(own_code.Span(name, phase, micro_batch, **fields))


def run_of(*spans: Any, trainings: int = 1, micro_batches: int = 4) -> dict[str, Any]:
    return {"spans": spans, "trainings": trainings, "micro_batches": micro_batches}


def test_the_cost_of_a_micro_batch_has_all_of_our_code_in_it_and_leaves_the_first_one_out() -> None:
    first = span("T.step", own_code.FIRST, 1, 100.0)
    typical = [span("T.step", micro_batch=2), span("view", micro_batch=2, seconds=2.0, is_target=False)]
    others = [span("T.step", micro_batch=number, seconds=3.0) for number in (3, 4)]
    outside = [span("T.step", own_code.EVALUATION, seconds=50.0), span("T.step", own_code.ONCE, 0, 50.0)]
    assert costs.in_a_micro_batch(run_of(first, *typical, *others, *outside), {"T.step"}) == 3.0
    assert costs.in_a_micro_batch(run_of(first, micro_batches=2), {"T.step"}) == 100.0
    assert costs.in_a_micro_batch(run_of(*outside, trainings=0, micro_batches=0), {"T.step"}) == 50.0
    assert costs.in_a_micro_batch(run_of(*outside, trainings=0, micro_batches=0), set()) is None


def test_the_cost_of_what_is_called_once_has_what_is_called_later_in_it() -> None:
    spans = [span("T.__init__", own_code.ONCE, 0), span("row", own_code.ONCE, 0, is_target=False)]
    assert costs.once(run_of(*spans, *spans, span("T.step", own_code.ONCE)), {"T.step"}) == 2.0
    assert costs.once(run_of(span("T.step")), {"T.step"}) is None


def measured_of(patch_id: str, *, largest: int = 1, modules: int = 0, sizes: Any = None) -> Any:
    (patch,) = (patch for patch in costs.patches() if patch.id == patch_id)
    name = patch.targets[0].attribute
    counted = {**run_of(span(name, largest=largest, modules=modules)), "tokens": {"unpatched": 10, "patched": 12}}
    return patch, {"counted": counted, "timed": [run_of(span(name, seconds=1e-4))], "sizes": sizes or {}}


@pytest.mark.parametrize("grown", [{"largest": 2}, {"modules": 20}])
def test_a_patch_that_allocates_or_walks_needs_a_case(grown: dict[str, int]) -> None:
    with pytest.raises(costs.NoCaseError, match="grpo-dapo-normaliser"):
        costs.cost(*measured_of("grpo-dapo-normaliser", **grown))


def test_the_share_of_a_step_has_the_walk_and_the_traffic_of_the_memory() -> None:
    found = costs.cost(*measured_of("grpo-dapo-normaliser"))
    (share,) = found["share"]["1000"]
    assert share == pytest.approx(1e-4 / costs.step_seconds(1000))
    assert found["tokens"] == 1.2
    assert not costs.summary(found)["above_goal"]

    def record(seconds: float, allocated: int, modules: int) -> dict[str, Any]:
        call = {"seconds": seconds, "bytes": allocated, "peak": allocated, "modules": modules, "synchronisations": 0}
        return {"first": call, "later": call, "model": {"modules": modules}}

    sizes = {"dense, 1000": record(1e-3, 0, 200), "dense, 100000": record(1e-3, 10**10, 200)}
    sizes["mixture, 1000"] = record(0.1, 0, 30_000)
    found = costs.cost(*measured_of("grpo-dapo-normaliser", modules=200, sizes=sizes))
    assert found["share"]["1000"] == [pytest.approx(1e-3 / costs.step_seconds(1000))]
    traffic = 2 * 10**10 / costs.BANDWIDTH
    assert found["share"]["100000"] == [pytest.approx((1e-3 + traffic) / costs.step_seconds(100_000))]
    assert found["share_of_mixture"] == pytest.approx(0.1 / costs.step_seconds(1000))
    assert costs.summary(found)["above_goal"]
    assert found["walk_ms"]["mixture"] == {"first": 100.0, "later": 100.0}
    assert costs.worst({"old": found, "new": costs.cost(*measured_of("grpo-dapo-normaliser"))})["place"] == "old"


def test_a_patch_that_cannot_be_measured_is_a_finding_and_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, without_case = (measured_of("grpo-dapo-normaliser", largest=largest) for largest in (1, 2))
    other = msgspec.structs.replace(fine[0], id="made-up")
    monkeypatch.setattr(costs, "patches", lambda: (fine[0], other))
    monkeypatch.setattr(costs, "places_of", lambda patch: ["here"])
    monkeypatch.setattr(costs, "answer", lambda patch, *_: without_case[1] if patch is other else fine[1])
    result = costs.run(quick=True)
    assert result.summary["patches"].keys() == {"grpo-dapo-normaliser"}
    assert "made-up allocates tensors or walks the model" in result.summary["failed"]["made-up"]
    assert result.findings[-1].verdict == "not met"


@pytest.mark.matrix
def test_the_costs_of_a_patch_with_the_real_trainer() -> None:
    (patch,) = (patch for patch in costs.patches() if patch.id == "left-padded-logprobs-absolute-positions")
    found = costs.cost(patch, costs.answer(patch, costs.places_of(patch)[0], 1))
    # The positions are a number of 8 bytes for each token, computed in three operations.
    assert found["bytes"] == {"1000": 16_000, "100000": 1_600_000}
    assert found["micro_batch_us"][0] > 0
    assert found["tokens"] == 1.0
    assert found["once_ms"] == []
