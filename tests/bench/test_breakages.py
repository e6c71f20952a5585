"""Each breakage of a wrapper is what it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.authoring import act, wrapper
from trl_hotfix.call import Call, Wrapped, takes_call
from trl_hotfix.patching.wrappers import Layer, wrapped_descriptor
from trl_hotfix.witness import Phase, ledger_of

from bench.mutants import breakages
from bench.mutants.breakages import Breakage


class Trainer:
    """What wrappers are put around here. The loss of TRL is the sum of each row."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(training=True)
        self.state = SimpleNamespace(global_step=0)

    def loss(self, rows: Any) -> Any:
        return rows.sum(1)


def plus_one(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapped(*args, **kwargs) + 1


def doubles_the_rows(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapped(args[0] * 2)


def weighs(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapped(*args, **kwargs) * 3


def does_nothing(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapped(*args, **kwargs)


@wrapper
def plus_one_by_call(call: Call) -> Any:
    return call() + 1


@wrapper
def doubles_by_call(call: Call) -> Any:
    return call.with_(rows=call["rows"] * 2)()


@wrapper
def weighs_by_call(call: Call) -> Any:
    return call() * 3


@wrapper
def does_nothing_by_call(call: Call) -> Any:
    return call()


def called(function: Any, trainer: Trainer, inputs: Any) -> Any:
    """Call a wrapper of either form around the loss."""
    if takes_call(function):
        return function(Call(trainer.loss, trainer, (inputs,)))
    return function(trainer.loss, trainer, (inputs,), {})


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def of(name: str) -> Breakage:
    targets = [f"{__name__}:Trainer.loss", f"{__name__}:Trainer.other"]
    return next(breakage for breakage in breakages.breakages(targets) if breakage.name == name)


def rows() -> Any:
    return torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], requires_grad=True)


def results(name: str, function: Any, trainer: Trainer, calls: int = 3) -> Iterator[list[float]]:
    broken = of(name).around(function)
    for _ in range(calls):
        yield called(broken, trainer, rows()).tolist()


OWN, PATCHED = [3.0, 7.0, 11.0, 15.0], [4.0, 8.0, 12.0, 16.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("only the first call", [PATCHED, OWN, OWN]),
        ("not the first call", [OWN, PATCHED, PATCHED]),
        ("every other call", [PATCHED, OWN, PATCHED]),
        ("only the first micro-batch of a step", [PATCHED, OWN, OWN]),
        ("not the first micro-batch of a step", [OWN, PATCHED, PATCHED]),
        ("only training", [PATCHED] * 3),
        ("only evaluation", [OWN] * 3),
        ("only the main rank", [PATCHED] * 3),
        ("constant", [PATCHED] * 3),
        ("wrong sign", [[2.0, 6.0, 10.0, 14.0]] * 3),
        ("doubled", [[5.0, 9.0, 13.0, 17.0]] * 3),
        ("halved", [[3.5, 7.5, 11.5, 15.5]] * 3),
        ("first row for all", [[4.0] * 4] * 3),
        ("mean of the rows for all", [[10.0] * 4] * 3),
        ("only the first row", [[4.0, 7.0, 11.0, 15.0]] * 3),
        ("not the last row", [[4.0, 8.0, 12.0, 15.0]] * 3),
        ("only the first half", [[4.0, 8.0, 11.0, 15.0]] * 3),
        ("only the second half", [[3.0, 7.0, 12.0, 16.0]] * 3),
        ("applied twice", [[5.0, 9.0, 13.0, 17.0]] * 3),
        (f"not on {__name__}:Trainer.loss", [OWN] * 3),
        (f"not on {__name__}:Trainer.other", [PATCHED] * 3),
    ],
)
def test_a_breakage_is_what_it_is_called(trainer: Trainer, name: str, expected: Any) -> None:
    assert list(results(name, plus_one, trainer)) == expected
    assert list(results(name, plus_one_by_call, trainer)) == expected


@pytest.mark.parametrize("function", [doubles_the_rows, doubles_by_call])
def test_the_arguments_that_a_wrapper_hands_on_are_changed_too(trainer: Trainer, function: Any) -> None:
    assert list(results("only the first row", function, trainer, 1)) == [[6.0, 7.0, 11.0, 15.0]]


def test_steps_and_trainers_are_told_apart(trainer: Trainer) -> None:
    first_of_step, first_trainer = (
        of(name).around(plus_one) for name in ("only the first micro-batch of a step", "only the first trainer")
    )
    for step in (0, 1):
        trainer.state.global_step = step
        assert [first_of_step(trainer.loss, trainer, (rows(),), {}).tolist() for _ in range(2)] == [PATCHED, OWN]
    assert first_trainer(trainer.loss, trainer, (rows(),), {}).tolist() == PATCHED
    other = Trainer()
    assert first_trainer(other.loss, other, (rows(),), {}).tolist() == OWN


@pytest.mark.parametrize(("name", "gradient"), [("detached", None), ("change detached", 1.0)])
def test_a_gradient_is_lost(trainer: Trainer, name: str, gradient: float | None) -> None:
    inputs = rows()
    result = of(name).around(weighs)(trainer.loss, trainer, (inputs,), {})
    assert result.tolist() == [9.0, 21.0, 33.0, 45.0]
    if gradient is None:
        assert not result.requires_grad
        return
    result.sum().backward()
    assert inputs.grad.tolist() == [[gradient] * 2] * 4


def test_what_changes_nothing_is_said_to_have_no_effect(trainer: Trainer) -> None:
    for name in breakages.CHANGES:
        breakage = of(name)
        breakage.around(does_nothing)(trainer.loss, trainer, (rows(),), {})
        assert not breakage.had_effect, name
    doubled = of("doubled")
    doubled.around(plus_one)(trainer.loss, trainer, (rows(),), {})
    assert doubled.had_effect


@pytest.mark.parametrize(
    "function",
    [
        *(plus_one, weighs, doubles_the_rows, does_nothing),
        *(plus_one_by_call, weighs_by_call, doubles_by_call, does_nothing_by_call),
    ],
)
def test_the_probe_knows_which_changes_have_an_effect(trainer: Trainer, function: Any) -> None:
    probe = Breakage("probe", breakages.probe)
    assert torch.equal(called(probe.around(function), trainer, rows()), called(function, trainer, rows()))
    with_effect = set()
    for name in breakages.CHANGES:
        breakage = of(name)
        called(breakage.around(function), trainer, rows())
        with_effect |= {name} if breakage.had_effect else set()
    assert breakages.CHANGES.keys() - breakages.ineffective(probe) == with_effect


def test_the_probe_takes_the_call_that_an_engine_gives(trainer: Trainer) -> None:
    probe = Breakage("probe", breakages.probe)
    given = Wrapped(trainer.loss, trainer, (rows(),))
    assert probe.around(plus_one)(given, trainer, given.args, {}).tolist() == PATCHED
    assert given.calls == 1


# Acts


def says_so(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    act()
    return wrapped(*args, **kwargs)


@wrapper
def says_so_by_call(call: Call) -> Any:
    call.act()
    return call()


@wrapper
def says_so_later(call: Call) -> Any:
    call.act_later()()
    return call()


@wrapper
def keeps_it_open(call: Call) -> Any:
    call.act_later()
    return call() + 1


CASES = [
    (plus_one, 1),
    (plus_one_by_call, 1),
    (doubles_by_call, 1),
    (does_nothing, 0),
    (does_nothing_by_call, 0),
    (says_so, 1),
    (says_so_by_call, 1),
    (says_so_later, 1),
    (keeps_it_open, 0),
]


@pytest.mark.parametrize(("function", "acted"), CASES)
@pytest.mark.parametrize("name", ["probe", "doubled", "only training", "applied twice"])
def test_what_a_broken_wrapper_does_is_counted_as_its_own(name: str, function: Any, acted: int) -> None:
    breakage = Breakage("probe", breakages.probe) if name == "probe" else of(name)
    owner: Any = type("Trainer", (Trainer,), {"loss": vars(Trainer)["loss"]})
    layer = Layer("a-patch", 1, breakage.around(function), traced=False)
    owner.loss = wrapped_descriptor(owner.loss, (layer,), owner, ("trl.made_up", "Trainer.loss"))
    trainer = owner()
    trainer.loss(rows())
    count = ledger_of(trainer).by_phase[Phase.OTHER].counts[layer.witnessed]
    assert (count.called, count.acted) == (1, acted)


@pytest.mark.parametrize(
    ("function", "effective"),
    [(does_nothing_by_call, False), (says_so, True), (says_so_by_call, True), (keeps_it_open, True)],
)
def test_the_probe_leaves_out_calls_in_which_a_wrapper_acts_by_its_word(
    trainer: Trainer, function: Any, effective: bool
) -> None:
    probe = Breakage("probe", breakages.probe)
    called(probe.around(function), trainer, rows())
    assert ("only evaluation" not in breakages.ineffective(probe)) is effective
    again = of("applied twice")
    called(again.around(function), trainer, rows())
    assert again.had_effect is effective


def test_options_come_beside_the_call(trainer: Trainer) -> None:
    @wrapper
    def adds(call: Call, options: Any) -> Any:
        return call() + options["more"]

    broken = of("doubled").around(adds)
    assert takes_call(functools.partial(broken, options={"more": 1}))
    assert broken(Call(trainer.loss, trainer, (rows(),)), options={"more": 1}).tolist() == [5.0, 9.0, 13.0, 17.0]
