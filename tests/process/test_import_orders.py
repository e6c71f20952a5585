"""Every order of imports, selections and actions of a user ends in the state that one oracle predicts.

The orders are generated. Each runs in its own process (``orders.py``), on the real TRL, with the real patches of the
release and two made-up ones: of a function that other modules hold by value, with an option, and of a plain, a static
and an inherited method. For more orders: ``ORDERS=3000 ORDERS_THREADED=200 pytest --shard 1/1`` with this file.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from trl_hotfix.catalogue import loading, parsing
from trl_hotfix.matching import gates

from helpers import sharing
from launched import LAUNCHED

if TYPE_CHECKING:
    from launched.environments import Environment

DRAWN = int(os.environ.get("ORDERS", "100"))
THREADED = int(os.environ.get("ORDERS_THREADED", "60"))

MOE = "moe-aux-loss-lost-under-deepspeed"
FUNCTION, METHODS = "order-function", "order-methods"
LEAF, OTHER = "trl.trainer.dpo_trainer", "trl.trainer.cpo_trainer"
"""The two patched modules that the orders import."""

LEAVES = {
    patch.id: {target.module for target in gates.targets_here(patch)}
    for patch in loading.load()
    if patch.default and gates.targets_here(patch)
}
PATCHES_OF_RELEASE = (*LEAVES, FUNCTION, METHODS)
"""The patches whose bugs this release has, with the libraries beside it."""

ON_THE_CLASS = {METHODS, *(patch_id for patch_id, modules in LEAVES.items() if LEAF in modules)}
VARIABLES: dict[str, dict[str, str]] = {
    "all": {},
    "only": {"TRL_HOTFIX_ONLY": f"{MOE},{FUNCTION}"},
    "skip": {"TRL_HOTFIX_SKIP": MOE},
    "options": {"TRL_HOTFIX_OPTIONS": f"{FUNCTION}.voice=loud"},
}
ASKED: dict[str, dict[str, Any]] = {
    "all": {},
    "only": {"only": {MOE, FUNCTION}},
    "skip": {"skip": {MOE}},
    "options": {"voice": "loud"},
}

MADE_UP = """
- id: order-function
  revision: 1
  title: made up
  severity: wrong-metric
  trl: ">=0.9.6"
  review_by: "2099-01-01"
  upstream: {}
  why: made up
  how: made up
  options:
    voice: {choices: {quiet: one, loud: another}, default: quiet}
  targets:
    - {module: trl.trainer.utils, attribute: pad_to_length, wrapper: answer}
  self_test: it_answers
- id: order-methods
  revision: 1
  title: made up
  severity: wrong-metric
  trl: ">=0.9.6"
  review_by: "2099-01-01"
  upstream: {}
  why: made up
  how: made up
  targets:
    - {module: trl.trainer.dpo_trainer, attribute: DPOTrainer.compute_reference_log_probs, wrapper: answer}
    - {module: trl.trainer.dpo_trainer, attribute: DPOTrainer.get_batch_logps, wrapper: answer}
    - {module: trl.trainer.dpo_trainer, attribute: DPOTrainer.training_step, wrapper: answer}
  self_test: it_answers
"""
HEAD = "from trl_hotfix.model import Outcome, Verdict\n\n"
FUNCTION_MODULE = f"""{HEAD}
def answer(wrapped, instance, args, kwargs, *, options):
    return options["voice"] if args == ("?",) else wrapped(*args, **kwargs)

def it_answers(leaf, *, options):
    try:
        return Outcome(Verdict.FIXED if leaf.pad_to_length("?") == options["voice"] else Verdict.ABSENT)
    except TypeError:
        return Outcome(Verdict.REPRODUCED)
"""
METHODS_MODULE = f"""{HEAD}
def answer(wrapped, instance, args, kwargs):
    return "new" if args == ("?",) else wrapped(*args, **kwargs)

def it_answers(leaf):
    trainer = object.__new__(leaf.DPOTrainer)
    try:
        said = {{trainer.compute_reference_log_probs("?"), trainer.get_batch_logps("?"), trainer.training_step("?")}}
    except (TypeError, AttributeError):
        return Outcome(Verdict.REPRODUCED)
    return Outcome(Verdict.FIXED if said == {{"new"}} else Verdict.ABSENT)
"""


# The oracle.


@dataclass
class Oracle:
    """The state that any order of events must lead to.

    A patch is on in each of its targets that is imported, if and only if the last selection has it and it has not been
    reverted since. Subclasses and instances follow their class. An object that Python bound by value (a bound method, a
    function that the user's module imported) stays as it was when it was bound.
    """

    leaf: int = 0
    utils: int = 0
    held: int = 0
    handed: int = 0
    other: bool = False
    starting: str | None = None
    start: str | None = None
    selection: dict[str, Any] | None = None
    reverted: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    on: dict[int, set[str]] = field(default_factory=dict)
    objects: dict[str, Callable[[], Any]] = field(default_factory=dict)

    @property
    def live(self) -> set[str]:
        if self.selection is None:
            return set()
        return self.selection.get("only", set(PATCHES_OF_RELEASE)) - self.selection.get("skip", set()) - self.reverted

    @property
    def voice(self) -> str | None:
        """The answer of the patched function, None if it is unpatched."""
        if FUNCTION not in self.live or self.selection is None:
            return None
        return str(self.selection.get("voice", "quiet"))

    def of_class(self, generation: int) -> Callable[[], Any]:
        return lambda: sorted(self.on[generation])

    def _select(self, selection: str) -> None:
        # An argument that is not passed has the value of its variable.
        self.selection, self.reverted = {**ASKED[self.start or "all"], **ASKED[selection]}, set()
        # A class that a reload has replaced is not patched any more: it can only lose patches.
        for patches in self.on.values():
            patches &= self.live
        if self.leaf:
            self.on[self.leaf] = self.live & ON_THE_CLASS

    def _started(self) -> None:
        """TRL_HOTFIX=1 takes effect first: at the look-up of TRL or at the first call of trl_hotfix."""
        if self.starting:
            self._select(self.starting)
            self.starting = None

    def _import(self) -> None:
        self._started()
        self.utils = self.utils or 1
        if not self.leaf:
            self._execute()

    def _execute(self) -> None:
        """Execute the leaf: it makes a new class, and takes the function from utils again."""
        self.leaf, self.held = self.leaf + 1, self.utils
        self.on[self.leaf] = self.live & ON_THE_CLASS

    def _keep(self, kind: str, value: Callable[[], Any]) -> None:
        self.objects[f"{kind}{sum(key.startswith(kind) for key in self.objects)}"] = value

    def happens(self, event: str) -> None:
        name, _, selection = event.partition(":")
        if name == "env":
            self.starting = self.start = selection
        elif name in ("leaf", "from_trl"):
            self._import()
            if name == "from_trl":
                self.handed = self.handed or self.leaf
        elif name in ("trl", "status"):
            self._started()
        elif name == "threads":
            # Whatever state the threads left, the next selection or revert decides.
            self.other = True
            self._import()
        elif name == "other":
            self._started()
            self.other, self.utils = True, self.utils or 1
        elif name in ("reload", "half_reload"):
            if selection:
                self._select(selection)
            self._execute()
        elif name == "reload_utils":
            # A module that holds the patched function by value gets the new one; one that holds TRL's own keeps that.
            self.held = self.utils + 1 if self.held == self.utils and self.voice else self.held
            self.utils += 1
        elif name == "apply":
            self._started()
            self._select(selection)
        elif name in ("half", "half_thread", "finder"):
            self._started()
            self._select(selection)
            self._import()
        elif name in ("revert", "revert_one", "half_revert"):
            self._started()
            reverted = self.live if name != "revert_one" else self.live & {METHODS}
            self.reverted |= reverted
            for patches in self.on.values():
                patches -= reverted
            if name == "half_revert":
                self._import()
        elif name == "subclass":
            self._keep("subclass", self.of_class(self.leaf))
        elif name == "instance":
            patches_now = sorted(self.on[self.leaf])
            self._keep("instance", self.of_class(self.leaf))
            self._keep("bound", lambda: patches_now)
        elif name == "by_value":
            voice = self.voice
            self._keep("value", lambda: voice)

    def seen(self) -> dict[str, Any]:
        on = {name: value() for name, value in self.objects.items()}
        if self.leaf:
            on |= {"class": sorted(self.on[self.leaf]), "held": self.voice if self.held == self.utils else None}
        if self.utils:
            on["function"] = self.voice
        # One finder while something waits: a leaf that may be imported (again); TRL; the trainer that gets a callback.
        return {"on": on, "finders": int(bool(self.live or self.start))}

    @property
    def past(self) -> set[str]:
        """The patches that only the reloaded class has, while ``trl`` still exports the class from before."""
        stale = self.handed not in (0, self.leaf)
        return (self.live & ON_THE_CLASS) - self.on[self.handed] if stale else set()

    def states(self) -> dict[str, str]:
        """Return the state and the reason of each patch of this release."""
        imported = {FUNCTION: self.utils, METHODS: self.leaf}
        imported |= {
            # The leaf imports the callbacks itself.
            patch_id: (self.leaf > 0 and bool(modules & {LEAF, "trl.trainer.callbacks"}))
            or (OTHER in modules and self.other)
            for patch_id, modules in LEAVES.items()
        }
        states = {}
        for patch in PATCHES_OF_RELEASE:
            if self.selection is None:
                states[patch] = "disabled switched-off"
            elif patch in self.selection.get("skip", ()):
                states[patch] = "disabled excluded"
            elif patch not in self.selection.get("only", PATCHES_OF_RELEASE):
                states[patch] = "disabled not-selected"
            elif patch in self.reverted:
                states[patch] = "reverted by-request"
            elif patch in self.past:
                states[patch] = "displaced replaced"
            else:
                states[patch] = "applied proven" if imported[patch] else "pending not-imported"
        return states

    def digest(self) -> tuple[str, ...]:
        """Return a key that two states share if and only if their digests are equal."""
        return (*sorted(self.live - self.past), *filter(None, [self.voice]))

    def allows(self, event: str) -> bool:
        name = event.partition(":")[0]
        if name in ("reload", "half_reload", "subclass", "instance"):
            return self.leaf > 0
        if name in ("reload_utils", "by_value"):
            return self.utils > 0
        if name in ("half", "half_thread", "half_revert", "finder"):
            return self.leaf == 0
        return True


# The orders.

Case = tuple[str, ...]

IMPORTS = ("leaf", "trl", "from_trl", "other", "reload", "reload_utils")
MIDDLES = ("half", "half_thread", "half_reload", "finder")
EVENTS = (
    *IMPORTS,
    *(f"apply:{selection}" for selection in ASKED),
    *(f"{middle}:{selection}" for middle in MIDDLES for selection in ("all", "only")),
    *("half_revert", "revert", "revert_one", "status", "cli", "subclass", "instance", "by_value"),
)
UNTOUCHED: Case = ("leaf", "other")
LISTED: dict[str, Case] = {selection: (f"env:{selection}", "leaf") for selection in ASKED}
STARTS: tuple[Case, ...] = ((), *((f"env:{selection}",) for selection in ASKED))
USER = ("subclass", "instance", "by_value")


def possible(case: Case) -> bool:
    oracle = Oracle()
    for event in case:
        if not oracle.allows(event):
            return False
        oracle.happens(event)
    return True


def by_plan() -> Iterator[Case]:
    """Yield every import of the trainer, times every pattern of applying, with and without the variable."""
    imports = [
        *(("leaf",), ("trl", "leaf"), ("from_trl",), ("other", "leaf"), ("leaf", "reload")),
        *(("half:all",), ("half_thread:all",), ("leaf", "half_reload:all"), ("finder:all",)),
    ]
    patterns: list[tuple[Case, Case]] = [
        (("apply:all",), ()),
        ((), ("apply:all",)),
        (("apply:all",), ("apply:all",)),
        (("apply:all", "apply:only"), ("apply:all",)),
        (("apply:options",), ("apply:skip", "apply:options")),
        ((), ("apply:all", "revert", "apply:all")),
    ]
    for start, trainer_import, (before, after) in product(STARTS[:2], imports, patterns):
        yield (*start, *before, *trainer_import, *USER, *after, *USER)


def by_pairs(generator: random.Random, covered: set[tuple[str, str]]) -> Iterator[Case]:
    """Yield orders of five in which every event comes before every other somewhere, where that is possible."""
    missing = [pair for pair in product(EVENTS, repeat=2) if pair not in covered]
    while missing:
        first = missing[0]
        cases = [case for case in (drawn(generator, required=first) for _ in range(200)) if case is not None]
        missing.remove(first)
        if cases:
            best = max(cases, key=lambda case: len(pairs(case) & set(missing)))
            missing = [pair for pair in missing if pair not in pairs(best)]
            yield best


def pairs(case: Case) -> set[tuple[str, str]]:
    return {(first, second) for index, first in enumerate(case) for second in case[index + 1 :]}


def drawn(generator: random.Random, required: Case = (), length: int = 5) -> Case | None:
    """Return a random possible order with the required events in this sequence, or None."""
    events = [*required, *generator.choices(EVENTS, k=length - len(required))]
    for _ in range(20):
        generator.shuffle(events)
        case = (*generator.choice(STARTS), *events)
        if possible(case) and (not required or required in pairs(case)):
            return case
    return None


@cache
def orders() -> list[Case]:
    generator = random.Random(20241107)
    cases = list(dict.fromkeys(by_plan()))
    cases += by_pairs(generator, set().union(*map(pairs, cases)))
    while len(cases) < 108 + DRAWN:
        case = drawn(generator)
        cases += [case] if case is not None else []
    return cases


PARTS = 4
THREADED_PARTS = 6
every_part = pytest.mark.parametrize("part", sharing.heavy(range(PARTS), smoke=[0]))


def cases_of(part: int) -> list[Case]:
    """Return every fourth order, after the one that does nothing and one for each selection."""
    return list(dict.fromkeys([UNTOUCHED, *LISTED.values(), *orders()[part::PARTS]]))


# The runs.


@pytest.fixture(scope="module")
def with_made_up(make_environment: Callable[[], Environment]) -> Environment:
    """Return an environment with a trl_hotfix that has the two made-up patches too."""
    environment = make_environment()
    package = environment.packages / "trl_hotfix"
    manifest = package / "data" / "patches.json"
    made_up = parsing.parse(MADE_UP, "made up", modules=False)
    manifest.write_bytes(msgspec.json.encode([*loading.load(), *made_up]))
    (package / "patches" / "order_function.py").write_text(FUNCTION_MODULE, encoding="utf-8")
    (package / "patches" / "order_methods.py").write_text(METHODS_MODULE, encoding="utf-8")
    return environment


def run(environment: Environment, cases: list[Case], mode: str, folder: Path, **variables: str) -> list[dict[str, Any]]:
    """Return the recorded answer of each case."""
    cases_file, answers = folder / "cases.json", folder / "answers.json"
    cases_file.write_text(json.dumps(cases), encoding="utf-8")
    script = str(LAUNCHED / "orders.py")
    # The bodies of the made-up patches' targets are not on record, and forks have no use for threads of torch.
    variables = {"TRL_HOTFIX_UNKNOWN_BODY": "try", "OMP_NUM_THREADS": "1", **variables}
    process = environment.run(script, str(cases_file), str(answers), mode, cwd=None, **variables)
    assert process.returncode == 0, process.stderr
    results: list[dict[str, Any]] = json.loads(answers.read_text(encoding="utf-8"))
    return results


@pytest.fixture(scope="module")
def answers_of_parts(
    request: pytest.FixtureRequest, with_made_up: Environment, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, dict[str, Any]]:
    """Return the answer of each case in the parts that are selected."""
    parts = {case["part"] for case in sharing.parameters(request)}
    cases = list(dict.fromkeys(case for part in sorted(parts) for case in cases_of(part)))
    return dict(zip(cases, run(with_made_up, cases, "forked", tmp_path_factory.mktemp("orders")), strict=True))


@pytest.fixture
def answers(answers_of_parts: dict[Case, dict[str, Any]], part: int) -> dict[Case, dict[str, Any]]:
    return {case: answers_of_parts[case] for case in cases_of(part)}


def complaints(case: Case, answer: dict[str, Any]) -> Iterator[str]:
    """Yield a text for each difference between the answer and the oracle."""
    if "error" in answer:
        yield f"{case}: {answer['error']}"
        return
    oracle = Oracle()
    for event, seen_after in zip(case, answer["after"], strict=True):
        oracle.happens(event)
        yield from differences(f"{case} after {event}", seen_after, oracle.seen())
    oracle.happens("status")
    report = answer["report"]
    yield from differences(f"{case} at the end", answer["end"], oracle.seen())
    states = {patch: report["states"][patch] for patch in PATCHES_OF_RELEASE}
    yield from differences(f"{case} states", states, oracle.states())
    verdicts = dict.fromkeys(ON_THE_CLASS, "reproduced") | dict.fromkeys(oracle.live & ON_THE_CLASS, "fixed")
    if not oracle.leaf:
        verdicts = {}
    yield from differences(f"{case} self-tests", report["self_tests"], verdicts)
    oracle.happens("revert")
    yield from differences(f"{case} reverted", answer["reverted"], oracle.seen())


def differences(place: str, actual: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    if actual != expected:
        yield f"{place}:\n  seen     {actual}\n  expected {expected}"


@every_part
def test_every_order_ends_where_the_oracle_says(answers: dict[Case, dict[str, Any]], part: int) -> None:
    assert len(answers) > 108 // PARTS
    all_complaints = [complaint for case, answer in answers.items() for complaint in complaints(case, answer)]
    assert not all_complaints, f"{len(all_complaints)} complaints in {len(answers)} orders\n" + "\n".join(
        all_complaints[:10]
    )


def test_every_possible_pair_of_events_occurs() -> None:
    covered = set().union(*map(pairs, orders()))
    possible_pairs = {pair for pair in product(EVENTS, repeat=2) if possible(("leaf", *pair)) or possible(pair)}
    assert possible_pairs <= covered


@every_part
def test_one_set_of_patches_has_one_digest(answers: dict[Case, dict[str, Any]], part: int) -> None:
    digests: dict[tuple[str, ...], set[str]] = {}
    for case, answer in answers.items():
        digests.setdefault(at_the_end(case).digest(), set()).add(answer["report"]["digest"])
        for digest in answer["cli"]:
            # --list prints the digest of the environment's selection, whatever the script has done.
            oracle = Oracle()
            oracle.happens(case[0] if case[0].startswith("env:") else "env:all")
            oracle.happens("status")
            digests.setdefault(oracle.digest(), set()).add(digest)
    assert all(len(digests_of_set) == 1 for digests_of_set in digests.values()), digests
    assert len(set().union(*digests.values())) == len(digests) > 5


def at_the_end(case: Case) -> Oracle:
    oracle = Oracle()
    for event in (*case, "status"):
        oracle.happens(event)
    return oracle


@every_part
def test_revert_restores_every_module_and_class(answers: dict[Case, dict[str, Any]], part: int) -> None:
    untouched = answers[UNTOUCHED]["vars"]
    for case, answer in answers.items():
        for name, members in answer["vars"].items():
            assert members == untouched[name], f"{name} in {case}"


def seen_by(case: Case) -> list[dict[str, Any]]:
    oracle, states = Oracle(), []
    for event in case:
        oracle.happens(event)
        states.append(oracle.seen())
    return states


@pytest.mark.parametrize("part", sharing.heavy(range(THREADED_PARTS), smoke=[0]))
def test_after_concurrent_calls_the_next_call_decides(with_made_up: Environment, tmp_path: Path, part: int) -> None:
    """There is no deadlock: after two minutes a process ends, and prints where its threads are."""
    starts = ("env:all",), ()
    ends = ("apply:skip",), ("apply:all",), ("revert",)
    seeds = range(THREADED * part // THREADED_PARTS, THREADED * (part + 1) // THREADED_PARTS)
    cases = [(*starts[seed % 2], f"threads:{seed}", *ends[seed % 3]) for seed in seeds]
    all_complaints = []
    for case, answer in zip(cases, run(with_made_up, cases, "forked", tmp_path), strict=True):
        if "error" not in answer:
            # The last thread decides which patches are on, and whether one that is off is `reverted`.
            answer["after"][:-1] = seen_by(case[:-1])
            if case[-1] == "revert":
                answer["report"]["states"] = at_the_end(case).states()
        all_complaints += complaints(case, answer)
    assert not all_complaints, f"{len(all_complaints)} complaints\n" + "\n".join(all_complaints[:5])


FRESH: list[Any] = [
    ("env:all", "from_trl"),
    pytest.param(("env:skip", "trl", "half:options", "reload"), marks=pytest.mark.matrix),
    pytest.param(("env:all", "apply:only", "from_trl", "subclass", "instance"), marks=pytest.mark.matrix),
    ("leaf", "subclass", "instance", "apply:all", "apply:options"),
]


@pytest.mark.parametrize("case", FRESH, ids=" ".join)
def test_fresh_processes_end_where_the_oracle_says(with_made_up: Environment, case: Case, tmp_path: Path) -> None:
    """With the variable, the real .pth starts trl_hotfix."""
    start = case[0].partition(":")[2]
    variables = {"TRL_HOTFIX": "1", **VARIABLES[start]} if case[0].startswith("env:") else {}
    (answer,) = run(with_made_up, [case], "fresh", tmp_path, **variables)
    assert list(complaints(case, answer)) == []


@pytest.mark.parametrize("part", [0])
@pytest.mark.parametrize("selection", ASKED)
def test_the_list_predicts_what_apply_does(
    with_made_up: Environment, answers: dict[Case, dict[str, Any]], selection: str, part: int
) -> None:
    # The made-up patches have no body on record.
    variables = {"TRL_HOTFIX_UNKNOWN_BODY": "try", **VARIABLES[selection]}
    process = with_made_up.run("-m", "trl_hotfix", "--list", "--json", cwd=None, **variables)
    listing = json.loads(process.stdout)
    oracle = at_the_end((f"env:{selection}",))
    case = LISTED[selection]
    assert listing["digest"] == answers[case]["report"]["digest"]
    listed = {patch["id"]: f"{patch['state']} {patch['reason']}" for patch in listing["patches"]}
    pending = {patch_id for patch_id, state in listed.items() if state.startswith("pending")}
    assert pending == oracle.live
    # The other patches have the reason that the report of a process has.
    reported = answers[case]["report"]["states"]
    assert {patch_id: state for patch_id, state in listed.items() if patch_id not in PATCHES_OF_RELEASE} == {
        patch_id: state for patch_id, state in reported.items() if patch_id not in PATCHES_OF_RELEASE
    }


def test_what_verify_proves_is_what_apply_puts_on(with_made_up: Environment) -> None:
    process = with_made_up.run("-m", "trl_hotfix", "--verify", "--json")
    cells = json.loads(process.stdout)["cells"]
    assert {cell["patch"]: cell["verdict"] for cell in cells} == dict.fromkeys(PATCHES_OF_RELEASE, "proven"), (
        process.stderr
    )
