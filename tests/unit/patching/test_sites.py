"""Layers are put on a class or a module and taken off again; what another library has changed stays."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, ModuleType
from typing import Any

import pytest
import wrapt

from trl_hotfix.model import Reason, Target
from trl_hotfix.patching.sites import MissingTargetError, OccupiedError, Sites
from trl_hotfix.patching.wrappers import reference_of

from helpers.sample_trainers import (
    MODULE,
    RAW,
    UTILS,
    Base,
    Subclass,
    Trainer,
    add,
    layer,
    new_module,
    site_of,
    target,
    times,
)

pytestmark = pytest.mark.usefixtures("sample_trainers_restored")

# One layer


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


def test_an_instance_made_before_the_patch_is_patched() -> None:
    trainer = Trainer()
    site_of("method").put_on(layer())
    assert trainer.method(1) == 102


def test_an_inherited_method_is_wrapped_in_the_subclass_only() -> None:
    before = dict(vars(Trainer))
    site = site_of("inherited")
    site.put_on(layer())
    assert Trainer().inherited(1) == 101
    assert Base().inherited(1) == 1
    site.take_off("a-patch")
    assert "inherited" not in vars(Trainer)
    assert Trainer.inherited is Base.inherited
    assert dict(vars(Trainer)) == before


def test_the_current_inherited_method_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites()
    site = sites.at(MODULE, target("Trainer.inherited"))
    site.put_on(layer())
    site.take_off("a-patch")
    monkeypatch.setattr(Base, "inherited", lambda self, x: x + 1000)
    sites.at(MODULE, target("Trainer.inherited")).put_on(layer())
    assert Trainer().inherited(1) == 1101


def test_an_inherited_class_method_gets_the_subclass() -> None:
    def look(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return instance.__name__, wrapped(*args, **kwargs)

    site = site_of("inherited_class_method")
    site.put_on(layer(wrapper=look))
    assert Subclass.inherited_class_method(1) == ("Subclass", ("Subclass", 1))
    site.take_off("a-patch")
    assert Subclass.inherited_class_method(1) == ("Subclass", 1)


def test_the_method_of_a_base_that_a_subclass_puts_in_between_is_called() -> None:
    class Mixin(Base):
        def inherited(self, x: Any) -> Any:
            return super().inherited(x) * 10

    class Mixed(Trainer, Mixin):
        pass

    assert Mixed().inherited(1) == 10
    site_of("inherited").put_on(layer())
    assert Mixed().inherited(1) == 110
    assert Trainer().inherited(1) == 101


@pytest.mark.parametrize("kind", ["inherited", "inherited_class_method"])
@pytest.mark.parametrize("order", [(Trainer, Subclass), (Subclass, Trainer)], ids=["base first", "base last"])
def test_a_patch_on_a_class_and_its_base_acts_once(order: Any, kind: str) -> None:
    sites, layers, calls = Sites(), {}, []

    def look(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        calls.append(instance)
        return wrapped(*args, **kwargs)

    before = {owner: dict(vars(owner)) for owner in order}
    subclass = Subclass()
    right = getattr(subclass, kind)(1)
    for owner in order:
        layers[owner] = layer(wrapper=look)
        sites.at(MODULE, target(f"{owner.__name__}.{kind}")).put_on(layers[owner])
        assert getattr(subclass, kind)(1) == right
    assert len(calls) == 2
    for owner in order:
        sites.at(MODULE, target(f"{owner.__name__}.{kind}")).take_off("a-patch")
    assert {owner: dict(vars(owner)) for owner in order} == before


def test_another_patch_on_the_base_acts_beneath() -> None:
    site_of("inherited", Subclass).put_on(layer("b-patch", times(10)))
    site_of("inherited").put_on(layer())
    assert Subclass().inherited(1) == 1010
    assert Trainer().inherited(1) == 101


def test_patches_on_one_inherited_method_compose_and_come_off_in_any_order() -> None:
    before, site = dict(vars(Trainer)), site_of("inherited")
    site.put_on(layer())
    site.put_on(layer("b-patch", times(10)))
    assert Trainer().inherited(1) == 1010
    site.take_off("a-patch")
    assert Trainer().inherited(1) == 10
    site.take_off("b-patch")
    assert dict(vars(Trainer)) == before


def test_an_inherited_method_is_called_with_any_object_as_before() -> None:
    site_of("inherited").put_on(layer())
    assert Trainer.inherited(object(), 1) == 101  # type: ignore[arg-type]
    assert Trainer.inherited(self=Trainer(), x=1) == 101


def test_an_inherited_coroutine_stays_one() -> None:
    site = site_of("coroutine", Subclass)
    site.put_on(layer(wrapper=lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs)))
    assert inspect.iscoroutinefunction(Subclass.coroutine)
    assert asyncio.run(Subclass().coroutine(3)) == 3


def test_a_static_method_stays_static() -> None:
    site_of("static").put_on(layer())
    assert isinstance(vars(Trainer)["static"], staticmethod)
    assert (Trainer.static(1), Trainer().static(1), Subclass.static(x=1)) == (103, 103, 103)


def test_a_class_method_stays_a_class_method() -> None:
    site_of("klass").put_on(layer())
    assert isinstance(vars(Trainer)["klass"], classmethod)
    assert (Trainer.klass(1), Trainer().klass(1), Subclass.klass(x=1)) == (102, 102, 107)


def test_a_traced_method_is_a_plain_function() -> None:
    site_of("method").put_on(layer(traced=True))
    assert type(vars(Trainer)["method"]) is FunctionType
    assert Trainer().method(1, times=2) == 104


def test_a_traced_function_takes_an_argument_named_self(monkeypatch: pytest.MonkeyPatch) -> None:
    module = new_module(monkeypatch, "trl.hook_self", "def f(*args, **kwargs):\n    return kwargs['self']\n")
    Sites().at(module, target("f")).put_on(layer(traced=True))
    assert module.f(self=1) == 101


@pytest.mark.parametrize("name", ["method", "static", "klass", "inherited", "coroutine"])
@pytest.mark.parametrize("traced", [False, True])
def test_the_same_descriptor_is_back_at_its_place(name: str, traced: bool) -> None:
    before = list(vars(Trainer).items())
    site = site_of(name)
    site.put_on(layer(traced=traced))
    assert vars(Trainer).get(name) is not dict(before).get(name)
    site.take_off("a-patch")
    after = list(vars(Trainer).items())
    assert [key for key, _ in after] == [key for key, _ in before]
    assert all(current is original for (_, current), (_, original) in zip(after, before, strict=True))


def test_the_same_function_is_back_at_its_place(utils: ModuleType) -> None:
    before = list(vars(utils).items())
    site = Sites().at(utils, target("pad"))
    site.put_on(layer())
    site.take_off("a-patch")
    after = list(vars(utils).items())
    assert [key for key, _ in after] == [key for key, _ in before]
    assert all(current is original for (_, current), (_, original) in zip(after, before, strict=True))


def test_taking_off_an_absent_layer_changes_nothing() -> None:
    before = dict(vars(Trainer))
    site = site_of("method")
    site.take_off("a-patch")
    site.put_on(layer("another"))
    site.take_off("a-patch")
    assert Trainer().method(1) == 102
    site.take_off("another")
    assert dict(vars(Trainer)) == before


def test_putting_a_layer_on_twice_is_once() -> None:
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


def test_each_of_two_layers_gets_the_instance() -> None:
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


def test_the_inner_layer_sees_the_original_signature() -> None:
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


def test_one_traced_layer_makes_the_site_traced() -> None:
    site = site_of("method")
    site.put_on(layer("first"))
    assert reference_of(vars(Trainer)["method"]) is not None
    site.put_on(layer("second", traced=True))
    assert type(vars(Trainer)["method"]) is FunctionType
    site.take_off("second")
    assert reference_of(vars(Trainer)["method"]) is not None


def wrapped_by_somebody(raw: Any) -> Any:
    @wrapt.decorator
    def decorator(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    return decorator(raw)


# Changes by other libraries


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
def test_a_foreign_change_is_left_alone(change: Callable[[], None], reason: Reason, on_first: bool) -> None:
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


def test_a_replacement_is_named_with_file_and_line() -> None:
    site = site_of("method")
    site.put_on(layer())

    def impostor(self: Any, x: Any) -> Any:
        return x

    Trainer.method = impostor  # type: ignore[method-assign,assignment]
    occupied = site.occupied()
    assert occupied is not None
    assert "impostor" in occupied.by
    assert f"test_sites.py:{impostor.__code__.co_firstlineno}" in occupied.by


def test_a_deleted_method_is_reported_as_deleted() -> None:
    site = site_of("method")
    site.put_on(layer())
    del Trainer.method
    occupied = site.occupied()
    assert occupied is not None
    assert occupied.by.endswith("Trainer.method was deleted")


def test_a_foreign_definition_of_an_inherited_method_stays() -> None:
    site = site_of("inherited")
    Trainer.inherited = lambda self, x: x  # type: ignore[method-assign,assignment]
    with pytest.raises(OccupiedError):
        site.put_on(layer())


def test_a_site_without_layers_wraps_the_current_method() -> None:
    sites = Sites()
    sites.at(MODULE, target("Trainer.method"))
    Trainer.method = lambda self, x: x  # type: ignore[method-assign,assignment]
    site = sites.at(MODULE, target("Trainer.method"))
    site.put_on(layer())
    assert Trainer().method(1) == 101


@pytest.mark.parametrize(
    "attribute", ["Trainer.missing", "Missing.method", "missing", "RAW.keys", "Trainer.number.real"]
)
def test_an_absent_target_is_missing(attribute: str) -> None:
    with pytest.raises(MissingTargetError, match=f"trl.somewhere has no {attribute}"):
        Sites().at(MODULE, target(attribute))


def test_a_class_reached_under_two_names_is_one_site(monkeypatch: pytest.MonkeyPatch) -> None:
    alias = new_module(monkeypatch, "trl.hook_alias", "")
    alias.Trainer = Trainer
    sites = Sites()
    site = sites.at(MODULE, target("Trainer.method"))
    assert sites.at(alias, target("Trainer.method")) is site


# Functions that other modules hold by value


def test_a_function_is_rebound_where_trl_imported_it(utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    user = new_module(
        monkeypatch, "trl.hook_user", "from trl.hook_utils import pad\nfrom trl.hook_utils import pad as p"
    )
    stranger = new_module(monkeypatch, "hook_stranger", "from trl.hook_utils import pad")
    lookalike = new_module(monkeypatch, "trlx_hook", "from trl.hook_utils import pad")
    raw = utils.pad
    site = Sites().at(utils, target("pad"))
    site.put_on(layer())
    assert (utils.pad(1), utils.caller(1), user.pad(1), user.p(1)) == (101, 101, 101, 101)
    assert stranger.pad is raw
    assert lookalike.pad is raw
    site.take_off("a-patch")
    assert utils.pad is user.pad is user.p is raw


def test_a_module_that_imported_the_wrapper_gets_the_original(
    utils: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = utils.pad
    site = Sites().at(utils, target("pad"))
    site.put_on(layer("first", add(10)))
    late = new_module(monkeypatch, "trl.hook_late", "from trl.hook_utils import pad")
    site.put_on(layer("second", times(2)))
    assert late.pad(1) == 22
    site.take_off("first")
    assert late.pad(1) == 2
    site.take_off("second")
    assert late.pad is raw


def test_a_reloaded_function_is_wrapped_in_every_module(utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    sites, user = Sites(), new_module(monkeypatch, "trl.hook_user", "from trl.hook_utils import pad")
    sites.at(utils, target("pad")).put_on(layer())
    exec(UTILS, vars(utils))  # as a reload does
    new, site = utils.pad, sites.at(utils, target("pad"))
    assert not site.layers
    site.put_on(layer())
    assert (utils.pad(1), user.pad(1)) == (101, 101)
    site.take_off("a-patch")
    assert utils.pad is user.pad is new


def test_a_foreign_function_is_not_taken_for_a_reload(utils: ModuleType) -> None:
    site = Sites().at(utils, target("pad"))
    raw = utils.pad
    site.put_on(layer())
    installed = utils.pad
    for foreign in (raw, lambda x: x, add(1)):
        utils.pad = foreign
        assert not site.reloaded()
    utils.pad = installed
    site.take_off("a-patch")


@pytest.mark.parametrize(
    ("changes", "is_old"),
    [
        ({}, False),
        ({"Trainer": None}, False),
        ({"Trainer": Subclass}, False),
        ({"Trainer": type("Trainer", (), {"__module__": "compiled_cache"})}, False),
        ({"Trainer": type("Trainer", (), {"__module__": MODULE.__name__, "__qualname__": "Other"})}, False),
        ({"Trainer": type("Trainer", (), {"__module__": MODULE.__name__})}, True),
    ],
    ids=["the same", "deleted", "another name", "another module", "another qualified name", "defined anew"],
)
def test_a_class_is_replaced_by_one_of_its_name_and_module(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_old: bool
) -> None:
    site = site_of("method")
    for name, value in changes.items():
        monkeypatch.setattr(MODULE, name, value)
    assert site.is_of_class_before_reload(MODULE) is is_old
    # A module that has the class under this name too did not define it.
    assert not site.is_of_class_before_reload(new_module(monkeypatch, "trl.hook_user", "class Trainer: pass"))


def test_a_function_is_of_no_class(utils: ModuleType) -> None:
    site = Sites().at(utils, target("pad"))
    exec(UTILS, vars(utils))
    assert not site.is_of_class_before_reload(utils)


def test_a_forgotten_site_is_not_found_again() -> None:
    sites = Sites()
    site, other = sites.at(MODULE, target("Trainer.method")), sites.at(MODULE, target("Trainer.static"))
    sites.forget(site)
    sites.forget(site)
    assert sites.at(MODULE, target("Trainer.method")) is not site
    assert sites.at(MODULE, target("Trainer.static")) is other


def test_all_layers_come_off_but_those_beneath_other_code() -> None:
    sites = Sites()
    for name in ("method", "static", "klass"):
        site = sites.at(MODULE, target(f"Trainer.{name}"))
        site.put_on(layer("first"))
        site.put_on(layer("second"))
    foreign = staticmethod(lambda x: x)
    Trainer.static = foreign  # type: ignore[method-assign,assignment]
    sites.clear()
    assert vars(Trainer)["method"] is RAW["method"]
    assert vars(Trainer)["static"] is foreign
    assert vars(Trainer)["klass"] is RAW["klass"]


def test_a_reexport_is_wrapped_in_that_module_only(utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    user = new_module(monkeypatch, "trl.hook_user", "from trl.hook_utils import pad")
    raw = utils.pad
    site = Sites().at(user, target("pad"))
    site.put_on(layer())
    assert user.pad(1) == 101
    assert utils.pad is raw
    site.take_off("a-patch")
    assert user.pad is raw


def test_a_module_blocked_in_sys_modules_is_skipped(utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # `sys.modules["trl.x"] = None` forbids an import.
    monkeypatch.setitem(sys.modules, "trl.hook_blocked", None)
    site = Sites().at(utils, target("pad"))
    site.put_on(layer())
    assert utils.pad(1) == 101
    site.take_off("a-patch")
    assert utils.pad(1) == 1


def test_a_refused_function_is_not_rebound(utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    user = new_module(monkeypatch, "trl.hook_user", "from trl.hook_utils import pad")
    site = Sites().at(utils, target("pad"))
    raw = utils.pad
    utils.pad = lambda x: x
    with pytest.raises(OccupiedError):
        site.put_on(layer())
    assert user.pad is raw


def test_a_thread_may_add_sites_while_another_lists_them() -> None:
    module = ModuleType("trl.grows")
    names = [f"function_{number}" for number in range(2_000)]
    for name in names:
        setattr(module, name, lambda: None)
    sites, all_added = Sites(), threading.Event()

    def list_until_all_are_added() -> None:
        while not all_added.is_set():
            sites.with_layer("a")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            listing = pool.submit(list_until_all_are_added)
            try:
                # A site without layers lives only while somebody holds it.
                added = [sites.at(module, Target("trl.grows", name, "")) for name in names]
            finally:
                all_added.set()
            listing.result()
    finally:
        sys.setswitchinterval(interval)
    assert len(added) == len(names)
