from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import dill
import pytest
import torch
import wrapt
from datasets.fingerprint import Hasher

from trl_hotfix.model import Reason, Target, Wrapper
from trl_hotfix.patching.sites import MissingTargetError, OccupiedError, Site, Sites
from trl_hotfix.patching.wrappers import HotfixWrapper, Layer, UnsupportedTargetError

RESTORED: list[tuple[Any, Any]] = []


def restore(reference: Any, instance: Any) -> tuple[str, Any, Any]:
    """What a pickle of ours calls: it stands at the top of a module, as the engine's own does."""
    RESTORED.append((reference, instance))
    return ("restored", reference, instance)


@pytest.fixture(autouse=True)
def nothing_restored() -> Iterator[None]:
    RESTORED.clear()
    yield
    RESTORED.clear()


# At the top of the module, so that instances can be pickled.
class Base:
    def inherited(self, x: Any) -> Any:
        return x

    @classmethod
    def inherited_class_method(cls, x: Any) -> tuple[str, Any]:
        return cls.__name__, x


class Trainer(Base):
    scale = 2

    def method(self, x: Any, *, times: int = 1) -> Any:
        """Multiply."""
        return x * self.scale * times

    @staticmethod
    def static(x: Any) -> Any:
        """Static."""
        return x * 3

    @classmethod
    def klass(cls, x: Any) -> Any:
        """Class."""
        return x * cls.scale

    async def coroutine(self, x: int) -> int:
        return x

    @property
    def prop(self) -> int:
        return 1

    number = 5


class Subclass(Trainer):
    scale = 7


RAW = dict(vars(Trainer))


@pytest.fixture(autouse=True)
def classes_are_as_they_were() -> Iterator[None]:
    yield
    for name in set(vars(Trainer)) - set(RAW):
        delattr(Trainer, name)
    for name in ("method", "static", "klass", "coroutine", "prop", "number"):
        setattr(Trainer, name, RAW[name])


def add(number: int) -> Wrapper:
    def adding(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **kwargs) + number

    return adding


def times(number: int) -> Wrapper:
    def multiplying(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **kwargs) * number

    return multiplying


def layer(
    patch_id: str = "a-patch", wrapper: Wrapper | None = None, *, revision: int = 1, traced: bool = False
) -> Layer:
    return Layer(patch_id, revision, wrapper or add(100), traced)


def target(attribute: str) -> Target:
    return Target("trl.somewhere", attribute, "wrapper")


def site_of(attribute: str, owner: type = Trainer) -> Site:
    return Sites(restore).at(sys.modules[__name__], target(f"{owner.__name__}.{attribute}"))


def new_module(monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module


UTILS = """
def pad(x, value=0):
    "Pad."
    return x + value

def caller(x):
    return pad(x)
"""


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return new_module(monkeypatch, "trl.hook_utils", UTILS)


# On and off


def test_a_method_is_wrapped_and_put_back() -> None:
    site = site_of("method")
    site.put_on(layer())
    assert Trainer().method(1) == 102
    assert Trainer().method(1, times=2) == 104
    assert Subclass().method(1) == 107
    site.take_off("a-patch")
    assert Trainer().method(1) == 2


def test_a_wrapper_gets_the_instance_and_the_arguments() -> None:
    calls: list[Any] = []

    def look(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        calls.append((instance, args, kwargs))
        return wrapped(*args, **kwargs)

    site_of("method").put_on(layer(wrapper=look))
    trainer = Trainer()
    assert trainer.method(1, times=3) == 6
    assert calls == [(trainer, (1,), {"times": 3})]


def test_a_method_called_through_its_class_gets_its_instance() -> None:
    calls: list[Any] = []

    def look(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        calls.append((instance, args))
        return wrapped(*args, **kwargs)

    site_of("method").put_on(layer(wrapper=look))
    subclass = Subclass()
    assert Trainer.method(subclass, 1) == 7
    assert calls == [(subclass, (1,))]


def test_an_instance_made_before_the_patch_has_it_too() -> None:
    trainer = Trainer()
    site_of("method").put_on(layer())
    assert trainer.method(1) == 102


def test_an_inherited_method_is_wrapped_in_the_subclass_only_and_deleted_again() -> None:
    before = dict(vars(Trainer))
    site = site_of("inherited")
    site.put_on(layer())
    assert Trainer().inherited(1) == 101
    assert Base().inherited(1) == 1
    site.take_off("a-patch")
    assert "inherited" not in vars(Trainer)
    assert Trainer.inherited is Base.inherited
    assert dict(vars(Trainer)) == before


def test_an_inherited_method_is_wrapped_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites(restore)
    site = sites.at(sys.modules[__name__], target("Trainer.inherited"))
    site.put_on(layer())
    site.take_off("a-patch")
    monkeypatch.setattr(Base, "inherited", lambda self, x: x + 1000)
    sites.at(sys.modules[__name__], target("Trainer.inherited")).put_on(layer())
    assert Trainer().inherited(1) == 1101


def test_an_inherited_class_method_is_called_with_the_subclass() -> None:
    def look(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return instance.__name__, wrapped(*args, **kwargs)

    site = site_of("inherited_class_method")
    site.put_on(layer(wrapper=look))
    assert Subclass.inherited_class_method(1) == ("Subclass", ("Subclass", 1))
    site.take_off("a-patch")
    assert Subclass.inherited_class_method(1) == ("Subclass", 1)


def test_a_static_method_stays_static() -> None:
    site_of("static").put_on(layer())
    assert isinstance(vars(Trainer)["static"], staticmethod)
    assert (Trainer.static(1), Trainer().static(1), Subclass.static(x=1)) == (103, 103, 103)


def test_a_class_method_stays_one() -> None:
    site_of("klass").put_on(layer())
    assert isinstance(vars(Trainer)["klass"], classmethod)
    assert (Trainer.klass(1), Trainer().klass(1), Subclass.klass(x=1)) == (102, 102, 107)


def test_a_traced_method_is_a_plain_function() -> None:
    site_of("method").put_on(layer(traced=True))
    assert type(vars(Trainer)["method"]) is FunctionType
    assert Trainer().method(1, times=2) == 104


def test_a_traced_method_takes_an_argument_that_is_called_self(monkeypatch: pytest.MonkeyPatch) -> None:
    module = new_module(monkeypatch, "trl.hook_self", "def f(*args, **kwargs):\n    return kwargs['self']\n")
    Sites(restore).at(module, target("f")).put_on(layer(traced=True))
    assert module.f(self=1) == 101


@pytest.mark.parametrize("name", ["method", "static", "klass", "inherited", "coroutine"])
@pytest.mark.parametrize("traced", [False, True])
def test_the_very_descriptor_is_back_at_its_very_place(name: str, traced: bool) -> None:
    before = list(vars(Trainer).items())
    site = site_of(name)
    site.put_on(layer(traced=traced))
    assert vars(Trainer).get(name) is not dict(before).get(name)
    site.take_off("a-patch")
    after = list(vars(Trainer).items())
    assert [key for key, _ in after] == [key for key, _ in before]
    assert all(current is original for (_, current), (_, original) in zip(after, before, strict=True))


def test_the_very_function_is_back_at_its_very_place_in_a_module(utils: ModuleType) -> None:
    before = list(vars(utils).items())
    site = Sites(restore).at(utils, target("pad"))
    site.put_on(layer())
    site.take_off("a-patch")
    after = list(vars(utils).items())
    assert [key for key, _ in after] == [key for key, _ in before]
    assert all(current is original for (_, current), (_, original) in zip(after, before, strict=True))


def test_taking_off_what_is_not_on_changes_nothing() -> None:
    before = dict(vars(Trainer))
    site = site_of("method")
    site.take_off("a-patch")
    site.put_on(layer("another"))
    site.take_off("a-patch")
    assert Trainer().method(1) == 102
    site.take_off("another")
    assert dict(vars(Trainer)) == before


def test_putting_on_twice_is_once() -> None:
    site = site_of("method")
    site.put_on(layer())
    site.put_on(layer())
    assert Trainer().method(1) == 102
    site.take_off("a-patch")
    assert vars(Trainer)["method"] is RAW["method"]


# Two layers


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", ["method", "static", "klass", "inherited"])
@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_two_layers_come_off_in_either_order(name: str, order: tuple[str, str], traced: bool) -> None:
    before = dict(vars(Trainer))
    raw = getattr(Trainer(), name)(1)
    site = site_of(name)
    site.put_on(layer("first", add(10), traced=traced))
    site.put_on(layer("second", times(2)))
    assert getattr(Trainer(), name)(1) == (raw + 10) * 2
    expected = {"first": raw * 2, "second": raw + 10}[order[0]]
    site.take_off(order[0])
    assert getattr(Trainer(), name)(1) == expected
    assert [site.has(patch_id) for patch_id in order] == [False, True]
    site.take_off(order[1])
    assert dict(vars(Trainer)) == before


def test_two_layers_give_their_wrappers_the_instance_each() -> None:
    instances: list[Any] = []

    def look(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        instances.append(instance)
        return wrapped(*args, **kwargs)

    site = site_of("method")
    site.put_on(layer("first", look))
    site.put_on(layer("second", look))
    trainer = Trainer()
    assert trainer.method(1) == 2
    assert instances == [trainer, trainer]


def test_the_inner_layer_sees_a_callable_with_the_signature_of_the_original() -> None:
    signatures: list[Any] = []

    def look(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        signatures.append(str(inspect.signature(wrapped)))
        return wrapped(*args, **kwargs)

    site = site_of("method")
    site.put_on(layer("first", look))
    site.put_on(layer("second", look))
    assert Trainer().method(1) == 2
    assert len(set(signatures)) == 1
    assert "self" not in signatures[0]


# Somebody else


def wrapped_by_somebody(raw: Any) -> Any:
    @wrapt.decorator
    def decorator(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    return decorator(raw)


@pytest.mark.parametrize("on_first", [False, True])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda: setattr(Trainer, "method", lambda self, x: x), Reason.REPLACED),
        (lambda: setattr(Trainer, "method", wrapped_by_somebody(vars(Trainer)["method"])), Reason.REPLACED),
        (lambda: delattr(Trainer, "method"), Reason.DELETED),
    ],
    ids=["replaced", "wrapped", "deleted"],
)
def test_what_somebody_else_has_changed_is_left_alone(
    change: Callable[[], None], reason: Reason, on_first: bool
) -> None:
    site = site_of("method")
    if on_first:
        site.put_on(layer())
    layers = site.layers
    change()
    foreign = vars(Trainer).get("method")
    with pytest.raises(OccupiedError) as caught:
        site.put_on(layer("another"))
    assert caught.value.reason is reason
    with pytest.raises(OccupiedError):
        site.take_off("a-patch")
    assert vars(Trainer).get("method") is foreign
    assert site.layers == layers


def test_who_replaced_a_method_is_named_with_file_and_line() -> None:
    site = site_of("method")
    site.put_on(layer())

    def impostor(self: Any, x: Any) -> Any:
        return x

    Trainer.method = impostor  # type: ignore[method-assign,assignment]
    occupied = site.occupied()
    assert occupied is not None
    assert "impostor" in occupied.by
    assert f"test_install.py:{impostor.__code__.co_firstlineno}" in occupied.by


def test_a_deleted_method_is_said_to_be_deleted() -> None:
    site = site_of("method")
    site.put_on(layer())
    del Trainer.method
    occupied = site.occupied()
    assert occupied is not None
    assert occupied.by.endswith("Trainer.method was deleted")


def test_somebody_who_defines_an_inherited_method_is_left_alone() -> None:
    site = site_of("inherited")
    Trainer.inherited = lambda self, x: x  # type: ignore[method-assign,assignment]
    with pytest.raises(OccupiedError):
        site.put_on(layer())


def test_a_site_without_layers_takes_what_is_there_now() -> None:
    sites = Sites(restore)
    sites.at(sys.modules[__name__], target("Trainer.method"))
    Trainer.method = lambda self, x: x  # type: ignore[method-assign,assignment]
    site = sites.at(sys.modules[__name__], target("Trainer.method"))
    site.put_on(layer())
    assert Trainer().method(1) == 101


# What cannot be wrapped


@pytest.mark.parametrize("name", ["prop", "number"])
@pytest.mark.parametrize("traced", [False, True])
def test_what_is_not_a_function_is_refused_and_nothing_is_changed(name: str, traced: bool) -> None:
    before = dict(vars(Trainer))
    site = site_of(name)
    with pytest.raises(UnsupportedTargetError, match=rf"Trainer\.{name} is .*, not a function"):
        site.put_on(layer(traced=traced))
    assert dict(vars(Trainer)) == before
    assert site.layers == ()
    assert site.occupied() is None


@pytest.mark.parametrize(
    "attribute", ["Trainer.missing", "Missing.method", "missing", "RAW.keys", "Trainer.number.real"]
)
def test_a_target_that_is_not_there_is_missing(attribute: str) -> None:
    with pytest.raises(MissingTargetError, match=f"trl.somewhere has no {attribute}"):
        Sites(restore).at(sys.modules[__name__], target(attribute))


def test_a_class_reached_under_two_names_is_one_site(monkeypatch: pytest.MonkeyPatch) -> None:
    alias = new_module(monkeypatch, "trl.hook_alias", "")
    alias.Trainer = Trainer
    sites = Sites(restore)
    site = sites.at(sys.modules[__name__], target("Trainer.method"))
    assert sites.at(alias, target("Trainer.method")) is site


# Functions that other modules hold by value


def test_a_function_is_rebound_where_trl_holds_it_by_value(utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    user = new_module(
        monkeypatch, "trl.hook_user", "from trl.hook_utils import pad\nfrom trl.hook_utils import pad as p"
    )
    stranger = new_module(monkeypatch, "hook_stranger", "from trl.hook_utils import pad")
    lookalike = new_module(monkeypatch, "trlx_hook", "from trl.hook_utils import pad")
    raw = utils.pad
    site = Sites(restore).at(utils, target("pad"))
    site.put_on(layer())
    assert (utils.pad(1), utils.caller(1), user.pad(1), user.p(1)) == (101, 101, 101, 101)
    assert stranger.pad is raw
    assert lookalike.pad is raw
    site.take_off("a-patch")
    assert utils.pad is user.pad is user.p is raw


def test_a_module_that_took_the_wrapper_by_value_gets_the_original_back(
    utils: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = utils.pad
    site = Sites(restore).at(utils, target("pad"))
    site.put_on(layer("first", add(10)))
    late = new_module(monkeypatch, "trl.hook_late", "from trl.hook_utils import pad")
    site.put_on(layer("second", times(2)))
    assert late.pad(1) == 22
    site.take_off("first")
    assert late.pad(1) == 2
    site.take_off("second")
    assert late.pad is raw


def test_a_function_of_a_module_that_was_reloaded_is_wrapped_anew_wherever_it_is_held(
    utils: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, user = Sites(restore), new_module(monkeypatch, "trl.hook_user", "from trl.hook_utils import pad")
    sites.at(utils, target("pad")).put_on(layer())
    exec(UTILS, vars(utils))  # what a reload does
    new, site = utils.pad, sites.at(utils, target("pad"))
    assert not site.layers
    site.put_on(layer())
    assert (utils.pad(1), user.pad(1)) == (101, 101)
    site.take_off("a-patch")
    assert utils.pad is user.pad is new


def test_a_function_that_somebody_else_has_put_there_is_not_taken_for_a_reload(utils: ModuleType) -> None:
    site = Sites(restore).at(utils, target("pad"))
    raw = utils.pad
    site.put_on(layer())
    installed = utils.pad
    for foreign in (raw, lambda x: x, add(1)):
        utils.pad = foreign
        assert not site.reloaded()
    utils.pad = installed
    site.take_off("a-patch")


def test_a_function_is_not_followed_from_a_module_that_only_imports_it(
    utils: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = new_module(monkeypatch, "trl.hook_user", "from trl.hook_utils import pad")
    raw = utils.pad
    site = Sites(restore).at(user, target("pad"))
    site.put_on(layer())
    assert user.pad(1) == 101
    assert utils.pad is raw
    site.take_off("a-patch")
    assert user.pad is raw


def test_a_name_that_sys_modules_blocks_is_no_hindrance(utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # `sys.modules["trl.x"] = None` is how an import is forbidden.
    monkeypatch.setitem(sys.modules, "trl.hook_blocked", None)
    site = Sites(restore).at(utils, target("pad"))
    site.put_on(layer())
    assert utils.pad(1) == 101
    site.take_off("a-patch")
    assert utils.pad(1) == 1


def test_a_refused_function_is_not_rebound(utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    user = new_module(monkeypatch, "trl.hook_user", "from trl.hook_utils import pad")
    site = Sites(restore).at(utils, target("pad"))
    raw = utils.pad
    utils.pad = lambda x: x
    with pytest.raises(OccupiedError):
        site.put_on(layer())
    assert user.pad is raw


# What a wrapped function looks like


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
    Sites(restore).at(utils, target("pad")).put_on(layer(traced=traced))
    assert inspect.signature(utils.pad) == inspect.signature(raw)
    assert (utils.pad.__name__, utils.pad.__doc__) == ("pad", "Pad.")
    assert inspect.isfunction(utils.pad)


@pytest.mark.parametrize("traced", [False, True])
def test_a_wrapped_coroutine_function_is_one(traced: bool) -> None:
    site_of("coroutine").put_on(layer(wrapper=lambda wrapped, instance, args, kwargs: wrapped(*args), traced=traced))
    assert inspect.iscoroutinefunction(Trainer.coroutine)
    assert inspect.iscoroutinefunction(Trainer().coroutine)


def test_the_source_of_a_wrapped_method_is_that_of_the_original() -> None:
    before = inspect.getsource(Trainer.method)
    site_of("method").put_on(layer())
    assert inspect.getsource(Trainer.method) == before


def test_a_bound_method_knows_its_instance() -> None:
    site_of("method").put_on(layer())
    trainer = Trainer()
    assert trainer.method.__self__ is trainer
    assert trainer.method.__func__ is not None


# Copies and pickles

WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "pickle by the oldest protocol": lambda value: pickle.loads(pickle.dumps(value, protocol=0)),
    "dill": lambda value: dill.loads(dill.dumps(value)),
    "dill with recurse": lambda value: dill.loads(dill.dumps(value, recurse=True)),
    "cloudpickle": lambda value: cloudpickle.loads(cloudpickle.dumps(value)),
}


@pytest.fixture(params=WAYS)
def roundtrip(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return WAYS[request.param]


def test_a_pickled_method_is_restored_by_our_own_name(roundtrip: Callable[[Any], Any]) -> None:
    site_of("method").put_on(layer(revision=3))
    reference = (__name__, "Trainer.method", (("a-patch", 3, ()),))
    assert roundtrip(Trainer.method) == ("restored", reference, None)
    assert roundtrip(Subclass.method) == ("restored", reference, None)


def test_a_pickled_bound_method_is_restored_with_its_instance(roundtrip: Callable[[Any], Any]) -> None:
    site_of("method").put_on(layer(revision=3))
    trainer = Trainer()
    trainer.mark = 17  # type: ignore[attr-defined]
    restored, reference, instance = roundtrip(trainer.method)
    assert (restored, reference) == ("restored", (__name__, "Trainer.method", (("a-patch", 3, ()),)))
    assert vars(instance) == {"mark": 17}


def test_a_pickled_function_is_restored_by_our_own_name(roundtrip: Callable[[Any], Any], utils: ModuleType) -> None:
    Sites(restore).at(utils, target("pad")).put_on(layer(revision=2))
    assert roundtrip(utils.pad) == ("restored", ("trl.hook_utils", "pad", (("a-patch", 2, ()),)), None)


def test_a_method_is_one_object_however_often_it_is_taken_from_the_class() -> None:
    site_of("method").put_on(layer())
    assert Trainer.method is Trainer.method
    assert Subclass.method is Trainer.method
    assert (Subclass.method(Trainer(), 1), Trainer.method(Subclass(), 1)) == (102, 107)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "cloudpickle"])
def test_what_stands_in_the_class_is_restored_by_our_own_name_but_for_cloudpickle(way: str) -> None:
    # Nothing gives it but vars(): cloudpickle does not find the very object by its name, and takes the original's code.
    site_of("method").put_on(layer(revision=3))
    assert WAYS[way](vars(Trainer)["method"])[1] == (__name__, "Trainer.method", (("a-patch", 3, ()),))
    assert WAYS["cloudpickle"](vars(Trainer)["method"])(Trainer(), 1) == 2


def test_cloudpickle_takes_the_original_of_a_method_that_is_wrapped_in_a_class_that_inherits_it() -> None:
    site_of("inherited").put_on(layer())
    assert Trainer.inherited(Trainer(), 1) == 101
    assert WAYS["cloudpickle"](Trainer.inherited)(Trainer(), 1) == 1
    assert WAYS["pickle"](Trainer.inherited)[0] == "restored"
    assert WAYS["cloudpickle"](Trainer().inherited)[0] == "restored"


def test_a_pickle_names_every_patch_of_the_function(roundtrip: Callable[[Any], Any]) -> None:
    site = site_of("method")
    site.put_on(layer("first"))
    site.put_on(layer("second", revision=4))
    assert roundtrip(Trainer.method)[1][2] == (("first", 1, ()), ("second", 4, ()))


def test_a_pickle_names_the_options_of_a_patch(roundtrip: Callable[[Any], Any], utils: ModuleType) -> None:
    chosen = (("over", "all"), ("tail", "keep-it"))
    for site, held in ((site_of("method"), Trainer), (Sites(restore).at(utils, target("pad")), utils)):
        site.put_on(dataclasses.replace(layer(), options=chosen))
        assert roundtrip(getattr(held, site.name))[1][2] == (("a-patch", 1, chosen),)


def test_the_hash_of_a_method_changes_with_the_options() -> None:
    hashes = set()
    for choice in ("all", "none"):
        site = site_of("method")
        site.put_on(dataclasses.replace(layer(), options=(("over", choice),)))
        hashes.add(Hasher.hash(Trainer().method))
        site.take_off("a-patch")
    assert len(hashes) == 2


def test_a_method_is_deep_copied_as_a_function_is() -> None:
    site_of("method").put_on(layer())
    wrapper = vars(Trainer)["method"]
    assert copy.deepcopy(wrapper) is wrapper


def test_a_method_is_copied_as_a_function_is() -> None:
    site_of("method").put_on(layer())
    wrapper = vars(Trainer)["method"]
    assert copy.copy(wrapper) is wrapper


@pytest.mark.parametrize("attribute", ["method"])
def test_an_object_that_holds_a_bound_method_can_be_deep_copied(attribute: str) -> None:
    site_of(attribute).put_on(layer())
    trainer = Trainer()
    held: dict[str, Any] = {"trainer": trainer, "call": trainer.method}
    copied = copy.deepcopy(held)
    assert copied["call"](1) == 102
    assert copied["call"].__self__ is copied["trainer"]


def test_an_object_that_holds_a_bound_method_can_be_copied() -> None:
    site_of("method").put_on(layer())
    trainer = Trainer()
    assert copy.copy(trainer.method)(1) == 102


# The cache of datasets


def test_the_hash_of_a_method_changes_with_the_patch() -> None:
    trainer = Trainer()
    before = Hasher.hash(trainer.method)
    site = site_of("method")
    site.put_on(layer())
    patched = Hasher.hash(trainer.method)
    site.take_off("a-patch")
    assert patched != before
    assert Hasher.hash(trainer.method) == before


def test_the_hash_of_a_function_changes_with_the_patch(utils: ModuleType) -> None:
    before = Hasher.hash(utils.pad)
    Sites(restore).at(utils, target("pad")).put_on(layer())
    assert Hasher.hash(utils.pad) != before


@pytest.mark.parametrize("name", ["static", "klass"])
def test_the_hash_of_a_static_or_class_method_changes_with_the_patch(name: str) -> None:
    before = Hasher.hash(getattr(Trainer, name))
    site_of(name).put_on(layer())
    assert Hasher.hash(getattr(Trainer, name)) != before


@pytest.mark.parametrize("name", ["static", "klass", "method"])
def test_the_hash_of_what_is_traced_is_another_for_another_revision(name: str) -> None:
    hashes = {Hasher.hash(getattr(Trainer, name))}
    for revision in (1, 2):
        site = site_of(name)
        site.put_on(layer(revision=revision, traced=True))
        hashes.add(Hasher.hash(getattr(Trainer, name)))
        site.take_off("a-patch")
    assert len(hashes) == 3


def test_the_hash_of_a_traced_function_changes_with_the_patch(utils: ModuleType) -> None:
    before = Hasher.hash(utils.pad)
    Sites(restore).at(utils, target("pad")).put_on(layer(traced=True))
    assert Hasher.hash(utils.pad) != before


def test_the_hash_of_a_static_method_is_the_same_for_the_same_patch_put_on_again() -> None:
    site = site_of("static")
    hashes = set()
    for _ in range(3):
        site.put_on(layer(wrapper=add(100)))
        hashes.add(Hasher.hash(Trainer.static))
        site.take_off("a-patch")
    assert len(hashes) == 1


def test_the_hash_is_the_same_for_the_same_patch_put_on_again() -> None:
    site = site_of("method")
    hashes = set()
    for _ in range(3):
        site.put_on(layer(wrapper=add(100)))
        hashes.add(Hasher.hash(Trainer().method))
        site.take_off("a-patch")
    assert len(hashes) == 1


def test_the_hash_is_another_for_another_revision() -> None:
    hashes = set()
    for revision in (1, 2):
        site = site_of("method")
        site.put_on(layer(revision=revision))
        hashes.add(Hasher.hash(vars(Trainer)["method"]))
        site.take_off("a-patch")
    assert len(hashes) == 2


def test_the_hash_of_a_closure_over_a_patched_method_changes_with_the_patch() -> None:
    trainer = Trainer()

    def tokenize(x: Any) -> Any:
        return method(x)

    method: Any = trainer.method
    before = Hasher.hash(tokenize)
    site_of("method").put_on(layer())
    method = trainer.method
    assert Hasher.hash(tokenize) != before


# torch.compile


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    torch._dynamo.reset()

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(function, backend="eager", **options)

    yield compiled
    torch._dynamo.reset()


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
    # A name for each compiled module: Dynamo keeps the module that it has seen under a name.
    utils = new_module(monkeypatch, "trl.hook_compiled", UTILS)
    Sites(restore).at(utils, target("pad")).put_on(layer())

    def step(x: torch.Tensor) -> torch.Tensor:
        return utils.caller(x) + 1

    eager = step(torch.ones(2))
    assert eager.tolist() == [102.0, 102.0]
    assert compiled(step)(torch.ones(2)).tolist() == eager.tolist()


def test_a_method_that_is_itself_compiled_runs_its_wrapper(compiled: Callable[..., Any]) -> None:
    site_of("method").put_on(layer())
    trainer = Trainer()
    assert compiled(trainer.method)(torch.ones(2)).tolist() == trainer.method(torch.ones(2)).tolist() == [102.0, 102.0]


@pytest.mark.parametrize("name", ["static", "klass"])
def test_a_compiled_caller_runs_the_wrapper_of_a_static_or_class_method(
    name: str, compiled: Callable[..., Any]
) -> None:
    site_of(name).put_on(layer())

    def step(x: torch.Tensor) -> torch.Tensor:
        return getattr(Trainer, name)(x) + getattr(Trainer(), name)(x)

    eager = step(torch.ones(2))
    raw = {"static": 3.0, "klass": 2.0}[name]
    assert eager.tolist() == [2 * (raw + 100)] * 2
    assert compiled(step)(torch.ones(2)).tolist() == eager.tolist()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ["method", "static", "klass", "inherited"])
def test_a_traced_method_is_compiled_without_a_break(name: str, layers: int, compiled: Callable[..., Any]) -> None:
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


def test_a_traced_function_is_compiled_without_a_break(
    monkeypatch: pytest.MonkeyPatch, compiled: Callable[..., Any]
) -> None:
    utils = new_module(monkeypatch, "trl.hook_traced", UTILS)
    Sites(restore).at(utils, target("pad")).put_on(layer(traced=True))

    def step(x: torch.Tensor) -> torch.Tensor:
        return utils.caller(x) + 1

    eager = step(torch.ones(2))
    assert eager.tolist() == [102.0, 102.0]
    assert compiled(step, fullgraph=True)(torch.ones(2)).tolist() == eager.tolist()


def test_an_untraced_method_is_a_loud_error_where_no_break_is_allowed(compiled: Callable[..., Any]) -> None:
    site_of("method").put_on(layer())
    trainer = Trainer()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        compiled(lambda x: trainer.method(x), fullgraph=True)(torch.ones(2))


def test_a_layer_that_is_traced_makes_the_whole_site_traced() -> None:
    site = site_of("method")
    site.put_on(layer("first"))
    assert isinstance(vars(Trainer)["method"], HotfixWrapper)
    site.put_on(layer("second", traced=True))
    assert type(vars(Trainer)["method"]) is FunctionType
    site.take_off("second")
    assert isinstance(vars(Trainer)["method"], HotfixWrapper)


def test_a_layer_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer().revision = 2  # type: ignore[misc]
