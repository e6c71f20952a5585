"""``patches.yaml`` -> ``tuple[Patch, ...]``: every mistake at once, each with its line."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from enum import Enum, EnumMeta
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec.structs import fields, replace
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from . import conditions, packs
from .errors import CatalogueError, Mistake, PackError, suggestion
from .model import Hit, Option, Options, Patch, Target

ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
CHOICE = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*\Z")
TRAINER = re.compile(r"[A-Z]\w*\Z")
ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?\Z")
DEPTH = 20
PATCH_MODULES: set[str] = set()
"""The modules that wrappers and self-tests have been taken from."""

MODULE = re.compile(r"trl(\.[A-Za-z_]\w*)+\Z")


@functools.cache
def load() -> tuple[Patch, ...]:
    """The patches of the ``patches.yaml`` that belongs to this package. Raises ``CatalogueError``."""
    return _read(manifest())


def known(names: Iterable[str]) -> tuple[Patch, ...]:
    """Our patches, and those of the packs of these names. Raises ``CatalogueError``, ``PackError``."""
    return load() + tuple(patch for name in names for patch in of_pack(name))


@functools.cache
def of_pack(name: str) -> tuple[Patch, ...]:
    """The patches of a pack, with the ids ``name/id``. Its modules are imported, as ours are when they are read."""
    pack = packs.find(name)
    path = pack.file("patches.yaml")
    if path is None:
        raise PackError(f"the pack {name!r} ({pack.release}) has no {pack.package}/patches.yaml")
    patches = _read(path, name)
    return tuple(replace(patch, id=f"{name}/{patch.id}") for patch in patches)


def _read(path: Path, pack: str = "") -> tuple[Patch, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogueError(str(path), [Mistake(1, f"cannot be read: {error}")]) from error
    return parse(text, str(path), pack)


def manifest() -> Path:
    """Where ``patches.yaml`` is: in the installed package, or at the top of the checkout that it is run from."""
    here = Path(__file__).resolve().parent
    checkout = here.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "patches.yaml").is_file():
        return checkout / "patches.yaml"
    return here / "patches.yaml"


def module_of(patch_id: str) -> str:
    """The name of the module that holds a patch's wrappers and self-test. The id is all that is shared."""
    pack, _, own = patch_id.rpartition("/")
    package = packs.find(pack).package if pack else __package__
    return f"{package}.patches.{own.replace('-', '_')}"


def function_of(patch: Patch, name: str, options: Options) -> Callable[..., Any]:
    """A wrapper or the self-test of ``patch`` by its name in the catalogue, with the user's choices if it has any."""
    module = import_module(module_of(patch.id))
    PATCH_MODULES.add(module.__name__)
    function: Callable[..., Any] = getattr(module, name)
    return functools.partial(function, options=patch.chosen(options)) if patch.options else function


def parse(text: str, path: str, pack: str = "") -> tuple[Patch, ...]:
    """The patches that ``text`` declares. Raises ``CatalogueError`` with every mistake in it."""
    mistakes: list[Mistake] = []
    patches = list(_patches(text, mistakes, pack))
    if mistakes:
        # A text that ends too early is said to be wrong on the line after its last.
        last = len(text.splitlines()) or 1
        raise CatalogueError(path, [Mistake(min(each.line, last), each.message) for each in mistakes])
    return tuple(patches)


class _Node(msgspec.Struct, frozen=True):
    """A YAML value with its line. A mapping's value is a dict of nodes, a sequence's a list of nodes."""

    value: Any
    line: int
    key_lines: Mapping[Hashable, int] = {}

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def _patches(text: str, mistakes: list[Mistake], pack: str) -> Iterator[Patch]:
    root = _compose(text, mistakes)
    if root is None:
        return
    if not isinstance(root.value, list):
        mistakes.append(Mistake(root.line, f"expected a list of patches, found {_kind(root.value)}"))
        return
    seen: dict[str, int] = {}
    for node in root.value:
        patch = _build(node, Patch, "patch", mistakes)
        line_of = _lines(node)
        named = node.value.get("id") if isinstance(node.value, dict) else None
        if named is not None and isinstance(named.value, str):
            if named.value in seen:
                message = f"duplicate id {named.value!r}, first used on line {seen[named.value]}"
                mistakes.append(Mistake(named.line, message))
            seen.setdefault(named.value, named.line)
        if patch is not None:
            mistakes.extend(_check(patch, line_of, pack))
            yield patch


class _TooDeepError(Exception):
    pass


def _compose(text: str, mistakes: list[Mistake]) -> _Node | None:
    """The text as nodes, built while libyaml reads it: its own composer overflows the stack where lists are deep."""
    events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    unwanted: list[Mistake] = []
    found: list[Mistake] = []
    root = None
    try:
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                mistakes.append(Mistake(_line(event), "not YAML: expected a single document, found another"))
                return None
            if isinstance(event, yaml.NodeEvent):
                root = _node(event, events, 0, unwanted, found)
    except _TooDeepError:
        pass
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        mistakes.append(Mistake(mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}"))
        return None
    except yaml.YAMLError as error:
        mistakes.append(Mistake(1, f"not YAML: {error or type(error).__name__}"))
        return None
    mistakes.extend(unwanted or found)
    if root is None and not mistakes:
        mistakes.append(Mistake(1, "expected a list of patches, found nothing"))
    return None if unwanted else root


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _node(event: Any, events: Iterator[Any], depth: int, unwanted: list[Mistake], mistakes: list[Mistake]) -> _Node:
    """The value that begins with ``event``. ``unwanted``: aliases and tags, for which a catalogue has no use."""
    line = _line(event)
    if isinstance(event, yaml.AliasEvent):
        unwanted.append(Mistake(line, f"an alias (*{event.anchor}); write the value out where it is used"))
        return _Node(None, line)
    if event.tag not in (None, "!"):
        message = f"a tag ({event.tag}); a catalogue is plain text, numbers, lists and mappings"
        unwanted.append(Mistake(line, message))
    if isinstance(event, yaml.ScalarEvent):
        return _Node(_scalar(event, mistakes), line)
    if depth == DEPTH:
        unwanted.append(Mistake(line, f"lists and mappings within one another, more than {DEPTH} deep"))
        raise _TooDeepError
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            items.append(_node(item, events, depth + 1, unwanted, mistakes))
        return _Node(items, line)
    values: dict[Hashable, _Node] = {}
    lines: dict[Hashable, int] = {}
    while not isinstance(first := next(events), yaml.MappingEndEvent):
        key = _node(first, events, depth + 1, unwanted, mistakes)
        value = _node(next(events), events, depth + 1, unwanted, mistakes)
        if not isinstance(key.value, str):
            mistakes.append(Mistake(key.line, f"expected a name as the key, found {_kind(key.value)} {key.plain()!r}"))
        elif key.value in values:
            mistakes.append(Mistake(key.line, f"duplicate key {key.value!r}, first used on line {lines[key.value]}"))
        else:
            values[key.value], lines[key.value] = value, key.line
    return _Node(values, line, lines)


def _scalar(event: Any, mistakes: list[Mistake]) -> Any:
    tag = _RESOLVER.resolve(yaml.ScalarNode, event.value, event.implicit)
    if tag == "tag:yaml.org,2002:str":
        return event.value
    try:
        # Construction alone, by the safe constructor: it refuses tags that name Python objects. Not a whole loader,
        # which would begin to scan an empty text for each value.
        node = yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark)
        return yaml.constructor.SafeConstructor().construct_object(node)
    except yaml.MarkedYAMLError as error:
        mistakes.append(Mistake(_line(event), f"not a plain value: {error.problem or error}"))
    except ValueError as error:  # a date that is none, such as 2026-02-31
        mistakes.append(Mistake(_line(event), f"not a plain value: {error}"))
    return None


_RESOLVER: Any = yaml.resolver.Resolver()


def _build(node: _Node, cls: Any, what: str, mistakes: list[Mistake]) -> Any:
    """An instance of the struct ``cls`` from ``node``, or None after saying all that is wrong with it."""
    if not isinstance(node.value, dict):
        mistakes.append(Mistake(node.line, f"expected {_a(what)} (a mapping), found {_kind(node.value)}"))
        return None
    # msgspec stops at the first mistake and knows no lines: for an entry that has one, each value is looked at.
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(node.plain(), cls)
    before = len(mistakes)
    known = {each.name: each for each in fields(cls)}
    for key in node.value:
        if key not in known:
            message = f"unknown key {key!r} in {_a(what)}{suggestion(key, known)}"
            mistakes.append(Mistake(node.key_lines[key], message))
    values = {}
    for name, each in known.items():
        if name in node.value:
            values[name] = _value(node.value[name], each.type, name, mistakes)
        elif each.required:
            mistakes.append(Mistake(node.line, f"the {what} lacks {name!r}"))
    return cls(**values) if len(mistakes) == before else None


def _value(node: _Node, hint: Any, name: str, mistakes: list[Mistake]) -> Any:
    if _is_struct(hint):
        return _build(node, hint, name, mistakes)
    item = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    if _is_struct(item) and isinstance(node.value, list):
        return tuple(_build(each, item, name.removesuffix("s"), mistakes) for each in node.value)
    item = typing.get_args(hint)[1] if typing.get_origin(hint) is Mapping else None
    if _is_struct(item) and isinstance(node.value, dict):
        return {key: _build(each, item, name.removesuffix("s"), mistakes) for key, each in node.value.items()}
    try:
        return msgspec.convert(node.plain(), type=hint)
    except msgspec.ValidationError as error:
        remedy = ""
        if hint in (str, str | None):
            remedy = " (put a version or a range in quotes)"
        elif isinstance(hint, EnumMeta):
            choices: list[Enum] = list(hint.__members__.values())
            remedy = f" (one of {', '.join(str(choice.value) for choice in choices)})"
        mistakes.append(Mistake(node.line, f"{name}: {error}{remedy}"))
    return None


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _lines(node: _Node) -> Callable[..., int]:
    """``line_of("targets", 0, "module")``: the line of that value, or the nearest one around it."""

    def line_of(*steps: str | int) -> int:
        at = node
        for step in steps:
            inner = at.value[step] if not isinstance(at.value, dict) or step in at.value else None
            if inner is None:
                break
            at = inner
        return at.line

    return line_of


def _check(patch: Patch, line_of: Callable[..., int], pack: str) -> Iterator[Mistake]:
    """What a well-typed entry can still get wrong."""
    if not ID.match(patch.id):
        yield Mistake(line_of("id"), f"id {patch.id!r} is not lower-case words joined by '-'")
    if patch.revision < 1:
        yield Mistake(line_of("revision"), f"revision {patch.revision} is less than 1")
    yield from _check_range(patch.trl, "trl", line_of("trl"))
    yield from _check_review(patch, line_of)
    for distribution, wanted in patch.requires.items():
        yield from _check_range(wanted, f"requires {distribution}", line_of("requires", distribution))
    if patch.upstream.fixed_in is not None:
        try:
            Version(patch.upstream.fixed_in)
        except InvalidVersion:
            line = line_of("upstream", "fixed_in")
            yield Mistake(line, f"fixed_in: {patch.upstream.fixed_in!r} is not a version")
    for name in patch.options:
        yield from _check_option(name, patch.options[name], functools.partial(line_of, "options", name))
    if not patch.targets:
        yield Mistake(line_of("targets"), "targets is empty: a patch wraps at least one method or function")
    for index, target in enumerate(patch.targets):
        yield from _check_target(target, index, line_of)
    for index, hit in enumerate(patch.hits):
        yield from _check_hit(hit, functools.partial(line_of, "hits", index))
    if ID.match(patch.id):
        yield from _check_functions(patch, line_of, pack)


def _check_option(name: str, option: Option, line_of: Callable[..., int]) -> Iterator[Mistake]:
    # They stand in environment variables and in the names of pickled functions.
    for word in (name, *option.choices):
        if not CHOICE.match(word):
            yield Mistake(line_of("choices", word), f"{word!r} is not lower-case words joined by '-' or '_'")
    if len(option.choices) < 2:
        yield Mistake(
            line_of("choices"), f"the option {name!r} has {len(option.choices)} choices, expected two or more"
        )
    if option.default not in option.choices:
        message = f"default {option.default!r} is none of the choices{suggestion(option.default, option.choices)}"
        yield Mistake(line_of("default"), message)


def _check_target(target: Target, index: int, line_of: Callable[..., int]) -> Iterator[Mistake]:
    if not MODULE.match(target.module):
        message = f"target {target.module!r} is outside 'trl.'; only modules of TRL are patched"
        yield Mistake(line_of("targets", index, "module"), message)
    if not ATTRIBUTE.match(target.attribute):
        message = f"attribute {target.attribute!r} is not a function or a Class.method"
        yield Mistake(line_of("targets", index, "attribute"), message)
    if target.trl is not None:
        yield from _check_range(target.trl, "trl", line_of("targets", index, "trl"))


def _check_hit(hit: Hit, line_of: Callable[..., int]) -> Iterator[Mistake]:
    if not hit.trainers:
        yield Mistake(line_of("trainers"), "trainers is empty: expected names such as [DPO, KTO], or ['*'] for any")
    for index, trainer in enumerate(hit.trainers):
        if trainer != "*" and (not TRAINER.match(trainer) or trainer.endswith("Trainer")):
            message = f"trainer {trainer!r} is not a name such as DPO, without Trainer, nor '*' for any"
            yield Mistake(line_of("trainers", index), message)
    for role, text in (("symptom", hit.symptom), ("depends", hit.depends)):
        if text is not None and not text.strip():
            yield Mistake(line_of(role), f"{role} is empty")
    for name, wanted in hit.when.items():
        line = line_of("when", name)
        if not conditions.NAME.match(name):
            yield Mistake(line, f"when: {name!r} is not the name of an argument, such as packing or model.adapter_name")
        wrong = conditions.validation_error(wanted)
        if wrong is not None:
            yield Mistake(line, f"when: {name}: {wrong}")
    if hit.trl is not None:
        yield from _check_range(hit.trl, "trl", line_of("trl"))


def _check_range(specifiers: str, name: str, line: int) -> Iterator[Mistake]:
    try:
        SpecifierSet(specifiers)
    except InvalidSpecifier:
        yield Mistake(line, f"{name}: {specifiers!r} is not a PEP 440 range such as '>=0.11.0,<0.12.0'")


def _check_review(patch: Patch, line_of: Callable[..., int]) -> Iterator[Mistake]:
    """A range without an end claims releases that nobody has seen, so it says when somebody looks again."""
    try:
        open_ended = SpecifierSet(patch.trl).contains("999999")
    except InvalidSpecifier:
        return
    if open_ended and patch.review_by is None:
        remedy = 'review_by: "2027-05-21", say, is the day by which to look whether newer releases still have the bug'
        yield Mistake(line_of("trl"), f"trl: {patch.trl!r} has no end and the patch no review_by; {remedy}")
    if not open_ended and patch.review_by is not None:
        yield Mistake(
            line_of("review_by"), f"review_by: the range {patch.trl!r} has an end, so nothing is to be reviewed"
        )


def _check_functions(patch: Patch, line_of: Callable[..., int], pack: str) -> Iterator[Mistake]:
    name = module_of(f"{pack}/{patch.id}" if pack else patch.id)
    missing = Mistake(line_of("id"), f"id {patch.id!r} has no module {name}")
    try:
        if pack and not _belongs(find_spec(name), pack):
            yield missing
            return
        module = import_module(name)
    # A third border where anything may come: the top level of a patch's module is code, and a mistake in it is one of
    # the catalogue.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            yield missing
        else:
            yield Mistake(line_of("id"), f"{name} cannot be imported: {type(error).__name__}: {error}")
        return
    functions = {key: value for key, value in vars(module).items() if isinstance(value, types.FunctionType)}
    here = {key for key, value in functions.items() if value.__module__ == name}
    named = [("self_test", patch.self_test, line_of("self_test"))]
    for index, target in enumerate(patch.targets):
        named.append(("wrapper", target.wrapper, line_of("targets", index, "wrapper")))
    for role, wanted, line in named:
        if wanted not in here:
            yield Mistake(line, f"{role}: {name} has no function {wanted!r}{suggestion(wanted, here)}")
        elif ("options" in inspect.signature(functions[wanted]).parameters) != bool(patch.options):
            found = "which the entry declares" if patch.options else "and the entry declares none"
            takes = "does not take" if patch.options else "takes"
            yield Mistake(line, f"{role}: {name}.{wanted} {takes} options, {found}")


def _belongs(spec: ModuleSpec | None, pack: str) -> bool:
    """Is the module a file that the pack's distribution has installed, where a patch's module belongs?"""
    if spec is None or spec.origin is None:
        return False
    its = packs.find(pack).file("patches", f"{spec.name.rpartition('.')[2]}.py")
    return its is not None and Path(spec.origin).is_file() and its.samefile(spec.origin)


def _a(what: str) -> str:
    return f"an {what}" if what[0] in "aeiou" else f"a {what}"


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    words: dict[type, str] = {dict: "a mapping", list: "a list", str: "text"}
    return words.get(type(value), f"a {type(value).__name__}")
