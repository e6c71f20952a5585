"""A wrapped method looks, is hashed by datasets and is compiled by torch as it should be."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets.fingerprint import Hasher

from trl_hotfix.authoring import module_of
from trl_hotfix.patching.sites import Sites
from trl_hotfix.patching.wrappers import UnsupportedTargetError, reference_of, wrapped_descriptor
from trl_hotfix.testing import absent_if_reexported

from helpers.sample_trainers import UTILS, Subclass, Trainer, add, layer, new_module, site_of, target

pytestmark = pytest.mark.usefixtures("sample_trainers_restored")


@pytest.mark.parametrize("name", ["prop", "number"])
@pytest.mark.parametrize("traced", [False, True])
def test_a_target_that_is_no_function_is_refused(name: str, traced: bool) -> None:
    before = dict(vars(Trainer))
    site = site_of(name)
    with pytest.raises(UnsupportedTargetError, match=rf"Trainer\.{name} is .*, not a function"):
        site.put_on(layer(traced=traced))
    assert dict(vars(Trainer)) == before
    assert site.layers == ()
    assert site.occupied() is None


# Signature, name, docstring and source


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", ["method", "static", "klass", "inherited"])
def test_a_wrapped_method_looks_like_the_original(name: str, traced: bool) -> None:
    def looks(owner: Any) -> tuple[Any, ...]:
        method = getattr(owner, name)
        return inspect.signature(method), method.__name__, method.__doc__, inspect.getsource(method)

    before = looks(Trainer), looks(Trainer())
    site_of(name).put_on(layer(traced=traced))
    assert (looks(Trainer), looks(Trainer())) == before


@pytest.mark.parametrize("traced", [False, True])
def test_a_wrapped_function_looks_like_the_original(utils: ModuleType, traced: bool) -> None:
    raw = utils.pad
    Sites().at(utils, target("pad")).put_on(layer(traced=traced))
    assert inspect.signature(utils.pad) == inspect.signature(raw)
    assert (utils.pad.__name__, utils.pad.__doc__) == ("pad", "Pad.")
    assert inspect.isfunction(utils.pad)


@pytest.mark.parametrize("traced", [False, True])
def test_a_wrapped_coroutine_function_stays_one(traced: bool) -> None:
    site_of("coroutine").put_on(layer(wrapper=lambda wrapped, instance, args, kwargs: wrapped(*args), traced=traced))
    assert inspect.iscoroutinefunction(Trainer.coroutine)
    assert inspect.iscoroutinefunction(Trainer().coroutine)


def test_a_wrapped_method_has_the_source_of_the_original() -> None:
    before = inspect.getsource(Trainer.method)
    site_of("method").put_on(layer())
    assert inspect.getsource(Trainer.method) == before


def test_a_bound_method_knows_its_instance() -> None:
    site_of("method").put_on(layer())
    trainer = Trainer()
    assert trainer.method.__self__ is trainer
    assert trainer.method.__func__ is vars(Trainer)["method"]


def test_a_class_returns_the_same_wrapper_every_time() -> None:
    site_of("method").put_on(layer())
    assert Trainer.method is Trainer.method
    assert Subclass.method is Trainer.method
    assert (Subclass.method(Trainer(), 1), Trainer.method(Subclass(), 1)) == (102, 107)


# Ways of calling

WAYS_TO_CALL: dict[str, Callable[[Trainer, Any], Any]] = {
    "bound": lambda trainer, x: trainer.method(x),
    "of the class": lambda trainer, x: Trainer.method(trainer, x),
    "the descriptor": lambda trainer, x: vars(Trainer)["method"](trainer, x),
    "the function of the bound method": lambda trainer, x: trainer.method.__func__(trainer, x),
    "a weak method": lambda trainer, x: weakref.WeakMethod(trainer.method)()(x),  # type: ignore[misc]
    "self by its name": lambda trainer, x: Trainer.method(self=trainer, x=x),
    "self by its name, as a descriptor": lambda trainer, x: vars(Trainer)["method"](self=trainer, x=x),
    "super": lambda trainer, x: super(Subclass, Subclass()).method(x) * trainer.scale // Subclass.scale,
    "a partial": lambda trainer, x: functools.partial(Trainer.method, trainer)(x),
    "a partialmethod": lambda trainer, x: functools.partialmethod(vars(Trainer)["method"], x).__get__(trainer)(),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("way", WAYS_TO_CALL)
def test_every_way_of_calling_a_method_reaches_its_wrappers(way: str, layers: int, traced: bool) -> None:
    instances = []

    def multiplies(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        instances.append(instance)
        return wrapped(*args, **kwargs) * 10

    trainer, site = Trainer(), site_of("method")
    before = WAYS_TO_CALL[way](trainer, 7)
    for number in range(layers):
        site.put_on(layer(f"patch-{number}", multiplies, traced=traced))
    assert WAYS_TO_CALL[way](trainer, 7) == before * 10**layers
    assert len(instances) == layers
    assert way == "super" or all(instance is trainer for instance in instances)


@pytest.mark.parametrize("traced", [False, True])
def test_an_original_that_was_kept_can_be_called_and_set_back(traced: bool) -> None:
    """Code that replaces a method keeps what ``vars`` has, calls it with the instance, and sets it back."""
    site_of("method").put_on(layer(traced=traced))
    original = vars(Trainer)["method"]
    Trainer.method = lambda self, x: original(self, x) + 1  # type: ignore[method-assign, assignment]
    assert Trainer().method(1) == 103
    Trainer.method = original  # type: ignore[method-assign]
    assert Trainer().method(1) == 102


NAMES = ("self", "wrapped", "instance", "args", "kwargs", "call", "count", "result")


def keywords(**given: Any) -> dict[str, Any]:
    return given


class Keywords:
    def method(this, /, **given: Any) -> dict[str, Any]:
        return given


@pytest.mark.parametrize("traced", [False, True])
def test_an_argument_may_have_any_name(monkeypatch: pytest.MonkeyPatch, traced: bool) -> None:
    given = {name: number for number, name in enumerate(NAMES)}

    def passes_on(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    put_on = [layer(f"patch-{number}", passes_on, traced=traced) for number in range(2)]
    for one in put_on:
        one.armed = True
    function = wrapped_descriptor(keywords, tuple(put_on), None, ("trl.made_up", "keywords"))
    method = wrapped_descriptor(Keywords.method, tuple(put_on), Keywords, ("trl.made_up", "Keywords.method"))
    monkeypatch.setattr(Keywords, "method", method)
    assert function(**given) == given
    assert Keywords().method(**given) == given
    assert not any(one.breaker.broken for one in put_on)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"x": 1}, {"self": 3, "y": 1}, {"self": 3}])
def test_a_call_without_its_arguments_raises_as_before(arguments: dict[str, Any], traced: bool) -> None:
    site_of("method").put_on(
        layer(traced=traced, wrapper=lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
    )
    with pytest.raises(TypeError, match="argument"):
        Trainer.method(**arguments)


def test_a_wrapper_finds_the_module_of_trl_behind_other_patches() -> None:
    modules = []

    def asks(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        modules.append(module_of(wrapped))
        return wrapped(*args, **kwargs)

    for number in range(2):
        site_of("method").put_on(layer(f"patch-{number}", asks))
    # The method that the subclass inherits is the patched one.
    method = wrapped_descriptor(vars(Trainer)["method"], (layer("inheriting", asks),), Subclass, ("trl.made_up", "m"))
    assert method(Subclass(), 1) == 7
    assert modules == [sys.modules[Trainer.__module__]] * 3


def test_a_self_test_takes_a_patched_method_for_that_of_its_module() -> None:
    site_of("method").put_on(layer())
    assert absent_if_reexported(sys.modules[Trainer.__module__], Trainer.method) is None
    assert absent_if_reexported(ModuleType("trl.old_place"), Trainer.method) is not None


# The cache of datasets


def test_a_method_hash_depends_on_the_options() -> None:
    hashes = set()
    for choice in ("all", "none"):
        site = site_of("method")
        site.put_on(dataclasses.replace(layer(), options=(("over", choice),)))
        hashes.add(Hasher.hash(Trainer().method))
        site.take_off("a-patch")
    assert len(hashes) == 2


def test_a_method_hash_depends_on_the_patch() -> None:
    trainer = Trainer()
    before = Hasher.hash(trainer.method)
    site = site_of("method")
    site.put_on(layer())
    patched = Hasher.hash(trainer.method)
    site.take_off("a-patch")
    assert patched != before
    assert Hasher.hash(trainer.method) == before


def test_a_function_hash_depends_on_the_patch(utils: ModuleType) -> None:
    before = Hasher.hash(utils.pad)
    Sites().at(utils, target("pad")).put_on(layer())
    assert Hasher.hash(utils.pad) != before


@pytest.mark.parametrize("name", ["static", "klass"])
def test_a_static_or_class_method_hash_depends_on_the_patch(name: str) -> None:
    before = Hasher.hash(getattr(Trainer, name))
    site_of(name).put_on(layer())
    assert Hasher.hash(getattr(Trainer, name)) != before


@pytest.mark.parametrize("name", ["static", "klass", "method"])
def test_a_traced_method_hash_depends_on_the_revision(name: str) -> None:
    hashes = {Hasher.hash(getattr(Trainer, name))}
    for revision in (1, 2):
        site = site_of(name)
        site.put_on(layer(revision=revision, traced=True))
        hashes.add(Hasher.hash(getattr(Trainer, name)))
        site.take_off("a-patch")
    assert len(hashes) == 3


def test_a_traced_function_hash_depends_on_the_patch(utils: ModuleType) -> None:
    before = Hasher.hash(utils.pad)
    Sites().at(utils, target("pad")).put_on(layer(traced=True))
    assert Hasher.hash(utils.pad) != before


def test_a_static_method_hash_is_stable_when_reapplied() -> None:
    site = site_of("static")
    hashes = set()
    for _ in range(3):
        site.put_on(layer(wrapper=add(100)))
        hashes.add(Hasher.hash(Trainer.static))
        site.take_off("a-patch")
    assert len(hashes) == 1


def test_a_method_hash_is_stable_when_reapplied() -> None:
    site = site_of("method")
    hashes = set()
    for _ in range(3):
        site.put_on(layer(wrapper=add(100)))
        hashes.add(Hasher.hash(Trainer().method))
        site.take_off("a-patch")
    assert len(hashes) == 1


def test_a_method_hash_depends_on_the_revision() -> None:
    hashes = set()
    for revision in (1, 2):
        site = site_of("method")
        site.put_on(layer(revision=revision))
        hashes.add(Hasher.hash(vars(Trainer)["method"]))
        site.take_off("a-patch")
    assert len(hashes) == 2


def test_a_closure_hash_depends_on_the_patched_method() -> None:
    trainer = Trainer()

    def tokenize(x: Any) -> Any:
        return method(x)

    method: Any = trainer.method
    before = Hasher.hash(tokenize)
    site_of("method").put_on(layer())
    method = trainer.method
    assert Hasher.hash(tokenize) != before


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    torch._dynamo.reset()

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(function, backend="eager", **options)

    yield compiled
    torch._dynamo.reset()


# torch.compile


def test_a_compiled_caller_runs_the_wrapper_of_a_method(compiled: Callable[..., Any]) -> None:
    site_of("method").put_on(layer())
    trainer = Trainer()

    def step(x: torch.Tensor) -> torch.Tensor:
        return trainer.method(x) + 1

    eager = step(torch.ones(2))
    assert eager.tolist() == [103.0, 103.0]
    assert compiled(step)(torch.ones(2)).tolist() == eager.tolist()


def test_a_compiled_caller_runs_the_wrapper_of_a_function(
    monkeypatch: pytest.MonkeyPatch, compiled: Callable[..., Any]
) -> None:
    # Each compiled module has a name of its own: Dynamo caches modules by name.
    utils = new_module(monkeypatch, "trl.hook_compiled", UTILS)
    Sites().at(utils, target("pad")).put_on(layer())

    def step(x: torch.Tensor) -> torch.Tensor:
        return utils.caller(x) + 1

    eager = step(torch.ones(2))
    assert eager.tolist() == [102.0, 102.0]
    assert compiled(step)(torch.ones(2)).tolist() == eager.tolist()


def test_a_compiled_method_runs_its_wrapper(compiled: Callable[..., Any]) -> None:
    site_of("method").put_on(layer())
    trainer = Trainer()
    assert compiled(trainer.method)(torch.ones(2)).tolist() == trainer.method(torch.ones(2)).tolist() == [102.0, 102.0]


@pytest.mark.parametrize("name", ["static", "klass"])
def test_a_compiled_caller_runs_static_and_class_wrappers(name: str, compiled: Callable[..., Any]) -> None:
    site_of(name).put_on(layer())

    def step(x: torch.Tensor) -> torch.Tensor:
        return getattr(Trainer, name)(x) + getattr(Trainer(), name)(x)

    eager = step(torch.ones(2))
    raw = {"static": 3.0, "klass": 2.0}[name]
    assert eager.tolist() == [2 * (raw + 100)] * 2
    assert compiled(step)(torch.ones(2)).tolist() == eager.tolist()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ["method", "static", "klass", "inherited"])
def test_a_traced_method_is_compiled_in_one_graph(name: str, layers: int, compiled: Callable[..., Any]) -> None:
    site = site_of(name)
    raw = getattr(Trainer(), name)(torch.ones(2))
    for number in range(layers):
        site.put_on(layer(f"patch-{number}", add(100), traced=True))
    trainer = Trainer()

    def step(x: torch.Tensor) -> torch.Tensor:
        return getattr(trainer, name)(x) + 1

    eager = step(torch.ones(2))
    assert eager.tolist() == (raw + 100 * layers + 1).tolist()
    assert compiled(step, fullgraph=True)(torch.ones(2)).tolist() == eager.tolist()


def test_a_traced_function_is_compiled_in_one_graph(
    monkeypatch: pytest.MonkeyPatch, compiled: Callable[..., Any]
) -> None:
    utils = new_module(monkeypatch, "trl.hook_traced", UTILS)
    Sites().at(utils, target("pad")).put_on(layer(traced=True))

    def step(x: torch.Tensor) -> torch.Tensor:
        return utils.caller(x) + 1

    eager = step(torch.ones(2))
    assert eager.tolist() == [102.0, 102.0]
    assert compiled(step, fullgraph=True)(torch.ones(2)).tolist() == eager.tolist()


def test_an_untraced_method_with_fullgraph_is_an_error(compiled: Callable[..., Any]) -> None:
    site_of("method").put_on(layer())
    trainer = Trainer()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        compiled(lambda x: trainer.method(x), fullgraph=True)(torch.ones(2))


def test_a_look_alike_is_not_ours() -> None:
    site_of("method").put_on(layer())
    assert reference_of(Trainer.method) is not None
    assert reference_of(functools.wraps(Trainer.method)(lambda *args: None)) is None
