"""Every order of imports, selections and whatever a user does in between ends where the one oracle says.

The orders are generated; each runs in a process of its own (``orders.py``), on the real TRL, with the real patches of
the release and two made-up ones: of a function that other modules hold by value, with an option, and of a plain, a
static and an inherited method. More of them: ``ORDERS=3000 ORDERS_THREADED=200 pytest`` with this file.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates

if TYPE_CHECKING:
    from conftest import Environment

DRAWN = int(os.environ.get("ORDERS", "100"))
THREADED = int(os.environ.get("ORDERS_THREADED", "60"))

MOE = "moe-aux-loss-lost-under-deepspeed"
FUNCTION, METHODS = "order-function", "order-methods"
LEAF, OTHER = "trl.trainer.dpo_trainer", "trl.trainer.cpo_trainer"
"""The two that the orders import."""

LEAVES = {
    patch.id: {target.module for target in gates.targets_for(patch, "0.11.4")}
    for patch in loading.load()
    if patch.default and gates.targets_for(patch, "0.11.4")
}
HERE = (*LEAVES, FUNCTION, METHODS)
"""The patches that this release has the bugs of."""

ON_THE_CLASS = {METHODS, *(each for each in LEAVES if LEAF in LEAVES[each])}
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
    - {module: trl.trainer.dpo_trainer, attribute: DPOTrainer.dpo_loss, wrapper: answer}
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
        said = {{trainer.dpo_loss("?"), trainer.get_batch_logps("?"), trainer.training_step("?")}}
    except TypeError:
        return Outcome(Verdict.REPRODUCED)
    return Outcome(Verdict.FIXED if said == {{"new"}} else Verdict.ABSENT)
"""


# The oracle.


@dataclass
class Oracle:
    """What must be true after any order of events.

    A patch is on in every place that TRL has for it and that is there, if and only if the last selection has it and it
    has not been reverted since. What is reached through a class goes with that class; what Python has bound by value (a
    bound method, a function that the user's module imported) stays what it was when it was taken.
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
        return self.selection.get("only", set(HERE)) - self.selection.get("skip", set()) - self.reverted

    @property
    def voice(self) -> str | None:
        """What the patched function answers."""
        if FUNCTION not in self.live or self.selection is None:
            return None
        return str(self.selection.get("voice", "quiet"))

    def of_class(self, generation: int) -> Callable[[], Any]:
        return lambda: sorted(self.on[generation])

    def _select(self, selection: str) -> None:
        # Each argument that is not given is its variable's.
        self.selection, self.reverted = {**ASKED[self.start or "all"], **ASKED[selection]}, set()
        # A class that a reload has thrown away is not looked for any more: it can only lose what it has.
        for patches in self.on.values():
            patches &= self.live
        if self.leaf:
            self.on[self.leaf] = self.live & ON_THE_CLASS

    def _started(self) -> None:
        """TRL_HOTFIX=1 comes first, whenever it comes to it: at the look-up of TRL or the first call of ours."""
        if self.starting:
            self._select(self.starting)
            self.starting = None

    def _import(self) -> None:
        self._started()
        self.utils = self.utils or 1
        if not self.leaf:
            self._execute()

    def _execute(self) -> None:
        """The leaf runs: another class, and the function taken anew."""
        self.leaf, self.held = self.leaf + 1, self.utils
        self.on[self.leaf] = self.live & ON_THE_CLASS

    def _keep(self, kind: str, what: Callable[[], Any]) -> None:
        self.objects[f"{kind}{sum(key.startswith(kind) for key in self.objects)}"] = what

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
            # Whatever they left, the next selection or revert decides.
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
            # Whoever holds the patched function by value goes on with the new one; who holds TRL's own, keeps that.
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
            gone = self.live if name != "revert_one" else self.live & {METHODS}
            self.reverted |= gone
            for patches in self.on.values():
                patches -= gone
            if name == "half_revert":
                self._import()
        elif name == "subclass":
            self._keep("subclass", self.of_class(self.leaf))
        elif name == "instance":
            taken = sorted(self.on[self.leaf])
            self._keep("instance", self.of_class(self.leaf))
            self._keep("bound", lambda: taken)
        elif name == "by_value":
            voice = self.voice
            self._keep("value", lambda: voice)

    def seen(self) -> dict[str, Any]:
        on = {name: what() for name, what in self.objects.items()}
        if self.leaf:
            on |= {"class": sorted(self.on[self.leaf]), "held": self.voice if self.held == self.utils else None}
        if self.utils:
            on["function"] = self.voice
        # One while something waits: a leaf that may come, or come again; TRL; the trainer that is given a callback.
        return {"on": on, "finders": int(bool(self.live or self.start))}

    @property
    def past(self) -> set[str]:
        """``trl`` goes on to hand out the class from before a reload; what is on the new one only, is past that."""
        stale = self.handed not in (0, self.leaf)
        return (self.live & ON_THE_CLASS) - self.on[self.handed] if stale else set()

    def states(self) -> dict[str, str]:
        """Of the patches of this release."""
        there = {FUNCTION: self.utils, METHODS: self.leaf}
        there |= {
            each: (LEAF in its and self.leaf > 0) or (OTHER in its and self.other) for each, its in LEAVES.items()
        }
        found = {}
        for patch in HERE:
            if self.selection is None:
                found[patch] = "disabled switched-off"
            elif patch in self.selection.get("skip", ()):
                found[patch] = "disabled excluded"
            elif patch not in self.selection.get("only", HERE):
                found[patch] = "disabled not-selected"
            elif patch in self.reverted:
                found[patch] = "reverted by-request"
            elif patch in self.past:
                found[patch] = "displaced replaced"
            else:
                found[patch] = "applied proven" if there[patch] else "pending not-imported"
        return found

    def digest(self) -> tuple[str, ...]:
        """Whatever has this has the same digest, and nothing else has."""
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
    """Every way in which the trainer comes in, times every pattern of applying, times who starts."""
    ways = [
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
    for start, way, (before, after) in product(STARTS[:2], ways, patterns):
        yield (*start, *before, *way, *USER, *after, *USER)


def by_pairs(draw: random.Random, covered: set[tuple[str, str]]) -> Iterator[Case]:
    """Orders of five in which every event comes somewhere before every other, as far as that is possible."""
    missing = [pair for pair in product(EVENTS, repeat=2) if pair not in covered]
    while missing:
        first = missing[0]
        cases = [case for case in (drawn(draw, must=first) for _ in range(200)) if case is not None]
        missing.remove(first)
        if cases:
            best = max(cases, key=lambda case: len(pairs(case) & set(missing)))
            missing = [pair for pair in missing if pair not in pairs(best)]
            yield best


def pairs(case: Case) -> set[tuple[str, str]]:
    return {(first, second) for index, first in enumerate(case) for second in case[index + 1 :]}


def drawn(draw: random.Random, must: Case = (), length: int = 5) -> Case | None:
    """Some order that is possible and has these events in it, one after the other."""
    events = [*must, *draw.choices(EVENTS, k=length - len(must))]
    for _ in range(20):
        draw.shuffle(events)
        case = (*draw.choice(STARTS), *events)
        if possible(case) and (not must or must in pairs(case)):
            return case
    return None


def orders() -> list[Case]:
    draw = random.Random(20241107)
    cases = list(dict.fromkeys(by_plan()))
    cases += by_pairs(draw, set().union(*map(pairs, cases)))
    while len(cases) < 108 + DRAWN:
        case = drawn(draw)
        cases += [case] if case is not None else []
    return cases


# The runs.


@pytest.fixture(scope="module")
def knows_more(make_environment: Callable[[], Environment]) -> Environment:
    """An environment with a trl_hotfix that knows the two made-up patches too."""
    environment = make_environment()
    package = environment.packages / "trl_hotfix"
    with (package / "patches.yaml").open("a", encoding="utf-8") as manifest:
        manifest.write(MADE_UP)
    (package / "patches" / "order_function.py").write_text(FUNCTION_MODULE, encoding="utf-8")
    (package / "patches" / "order_methods.py").write_text(METHODS_MODULE, encoding="utf-8")
    return environment


def run(environment: Environment, cases: list[Case], how: str, folder: Path, **variables: str) -> list[dict[str, Any]]:
    """What was seen in each case."""
    given, answers = folder / "cases.json", folder / "answers.json"
    given.write_text(json.dumps(cases), encoding="utf-8")
    script = str(Path(__file__).with_name("orders.py"))
    # No release has the bodies that the made-up patches are for; and forks have no use for threads of torch.
    variables = {"TRL_HOTFIX_UNKNOWN_BODY": "try", "OMP_NUM_THREADS": "1", **variables}
    done = environment.run(script, str(given), str(answers), how, cwd=None, **variables)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(answers.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def answers(knows_more: Environment, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    cases = [UNTOUCHED, *orders()]
    return dict(zip(cases, run(knows_more, cases, "forked", tmp_path_factory.mktemp("orders")), strict=True))


def complaints(case: Case, answer: dict[str, Any]) -> Iterator[str]:
    """Where what was seen is not what the oracle says."""
    if "error" in answer:
        yield f"{case}: {answer['error']}"
        return
    oracle = Oracle()
    for event, seen in zip(case, answer["after"], strict=True):
        oracle.happens(event)
        yield from differences(f"{case} after {event}", seen, oracle.seen())
    oracle.happens("status")
    report = answer["report"]
    yield from differences(f"{case} at the end", answer["end"], oracle.seen())
    yield from differences(f"{case} states", {each: report["states"][each] for each in HERE}, oracle.states())
    here = oracle.live & ON_THE_CLASS
    verdicts = {each: "fixed" if each in here else "reproduced" for each in ON_THE_CLASS} if oracle.leaf else {}
    yield from differences(f"{case} self-tests", report["self_tests"], verdicts)
    oracle.happens("revert")
    yield from differences(f"{case} reverted", answer["reverted"], oracle.seen())


def differences(where: str, seen: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    if seen != expected:
        yield f"{where}:\n  seen     {seen}\n  expected {expected}"


def test_every_order_ends_where_the_oracle_says(answers: dict[Case, dict[str, Any]]) -> None:
    assert len(answers) > 108
    wrong = [said for case, answer in answers.items() for said in complaints(case, answer)]
    assert not wrong, f"{len(wrong)} complaints in {len(answers)} orders\n" + "\n".join(wrong[:10])


def test_every_event_comes_before_every_other_where_that_is_possible(answers: dict[Case, dict[str, Any]]) -> None:
    seen = set().union(*map(pairs, answers))
    ever = {pair for pair in product(EVENTS, repeat=2) if possible(("leaf", *pair)) or possible(pair)}
    assert ever <= seen


def test_one_set_of_repairs_has_one_digest_in_every_order(answers: dict[Case, dict[str, Any]]) -> None:
    digests: dict[tuple[str, ...], set[str]] = {}
    for case, answer in answers.items():
        digests.setdefault(at_the_end(case).digest(), set()).add(answer["report"]["digest"])
        for named in answer["cli"]:
            # --list speaks of what the environment selects, whatever the script has done.
            oracle = Oracle()
            oracle.happens(case[0] if case[0].startswith("env:") else "env:all")
            oracle.happens("status")
            digests.setdefault(oracle.digest(), set()).add(named)
    assert all(len(each) == 1 for each in digests.values()), digests
    assert len(set().union(*digests.values())) == len(digests) > 5


def at_the_end(case: Case) -> Oracle:
    oracle = Oracle()
    for event in (*case, "status"):
        oracle.happens(event)
    return oracle


def test_after_revert_every_module_and_class_is_as_in_a_process_without_patches(
    answers: dict[Case, dict[str, Any]],
) -> None:
    untouched = answers[UNTOUCHED]["vars"]
    for case, answer in answers.items():
        for name, found in answer["vars"].items():
            assert found == untouched[name], f"{name} in {case}"


def seen_by(case: Case) -> list[dict[str, Any]]:
    oracle, seen = Oracle(), []
    for event in case:
        oracle.happens(event)
        seen.append(oracle.seen())
    return seen


def test_threads_that_import_select_and_revert_at_once_leave_what_the_next_call_says(
    knows_more: Environment, tmp_path: Path
) -> None:
    """Without a deadlock: a process that is not through after two minutes ends, and says where its threads stand."""
    starts = ("env:all",), ()
    ends = ("apply:skip",), ("apply:all",), ("revert",)
    cases = [(*starts[n % 2], f"threads:{n}", *ends[n % 3]) for n in range(THREADED)]
    wrong = []
    for case, answer in zip(cases, run(knows_more, cases, "forked", tmp_path), strict=True):
        if "error" not in answer:
            # What is on while they run depends on who comes last; so does whether a patch that is off is `reverted`.
            answer["after"][:-1] = seen_by(case[:-1])
            if case[-1] == "revert":
                answer["report"]["states"] = at_the_end(case).states()
        wrong += complaints(case, answer)
    assert not wrong, f"{len(wrong)} complaints\n" + "\n".join(wrong[:5])


FRESH: list[Case] = [
    ("env:all", "from_trl"),
    ("env:skip", "trl", "half:options", "reload"),
    ("env:all", "apply:only", "from_trl", "subclass", "instance"),
    ("leaf", "subclass", "instance", "apply:all", "apply:options"),
]


@pytest.mark.parametrize("case", FRESH, ids=" ".join)
def test_processes_that_start_from_nothing_end_there_too(knows_more: Environment, case: Case, tmp_path: Path) -> None:
    """With the variable, it is the real .pth that starts it."""
    start = case[0].partition(":")[2]
    variables = {"TRL_HOTFIX": "1", **VARIABLES[start]} if case[0].startswith("env:") else {}
    (answer,) = run(knows_more, [case], "fresh", tmp_path, **variables)
    assert list(complaints(case, answer)) == []


@pytest.mark.parametrize("selection", ASKED)
def test_the_list_says_what_apply_then_does(
    knows_more: Environment, answers: dict[Case, dict[str, Any]], selection: str
) -> None:
    done = knows_more.run("-m", "trl_hotfix", "--list", "--json", cwd=None, **VARIABLES[selection])
    said = json.loads(done.stdout)
    oracle = at_the_end((f"env:{selection}",))
    case = next(case for case in answers if at_the_end(case).digest() == oracle.digest())
    assert said["digest"] == answers[case]["report"]["digest"]
    listed = {each["id"]: f"{each['state']} {each['reason']}" for each in said["patches"]}
    pending = {each for each, state in listed.items() if state.startswith("pending")}
    assert pending == oracle.live
    # The others have the reason that the report of a process gives.
    others = answers[case]["report"]["states"]
    assert {each: state for each, state in listed.items() if each not in HERE} == {
        each: state for each, state in others.items() if each not in HERE
    }


def test_what_verify_proves_is_what_apply_puts_on(knows_more: Environment) -> None:
    done = knows_more.run("-m", "trl_hotfix", "--verify", "--json")
    cells = json.loads(done.stdout)["cells"]
    assert {cell["patch"]: cell["verdict"] for cell in cells} == dict.fromkeys(HERE, "proven"), done.stderr
