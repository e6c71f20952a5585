"""Check an entry against the module of its patch: each function that it names is there, and takes options or not.

That imports the module, for which a start of a training has no time. ``shipped`` checks the package's own
catalogue, in ``make lint`` and in the build of a wheel. A pack is checked whenever it is loaded: nobody knows whether
its author checked it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from ..errors import Mistake, suggestion
from ..model import Patch
from . import packs
from .checks import ID
from .modules import is_from_outside, module_of


def check_functions(patch: Patch, line_of: Callable[..., int], pack: str) -> Iterator[Mistake]:
    """Yield every mistake in the functions that an entry names."""
    if not ID.match(patch.id):
        return  # It has no module: the name of the module is made from the id.
    name = module_of(f"{pack}/{patch.id}" if pack else patch.id)
    missing = Mistake(line_of("id"), f"id {patch.id!r} has no module {name}")
    try:
        if pack and not _belongs(find_spec(name), pack):
            yield missing
            return
        module = import_module(name)
    # The top level of a patch's module is code that may raise anything. Such an error is a mistake in the catalogue.
    except (Exception, SystemExit) as error:
        if is_from_outside(error):
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            yield missing
        else:
            yield Mistake(line_of("id"), f"{name} cannot be imported: {type(error).__name__}: {error}")
        return
    functions = {key: value for key, value in vars(module).items() if isinstance(value, types.FunctionType)}
    defined = {key for key, value in functions.items() if value.__module__ == name}
    references = [("self_test", patch.self_test, line_of("self_test"))]
    for index, target in enumerate(patch.targets):
        references.append(("wrapper", target.wrapper, line_of("targets", index, "wrapper")))
    for role, function_name, line in references:
        if function_name not in defined:
            yield Mistake(line, f"{role}: {name} has no function {function_name!r}{suggestion(function_name, defined)}")
        elif ("options" in inspect.signature(functions[function_name]).parameters) != bool(patch.options):
            declared = "which the entry declares" if patch.options else "and the entry declares none"
            takes = "does not take" if patch.options else "takes"
            yield Mistake(line, f"{role}: {name}.{function_name} {takes} options, {declared}")


def _belongs(spec: ModuleSpec | None, pack: str) -> bool:
    """Return whether the module is a file in the pack's ``patches`` folder that its distribution has installed."""
    if spec is None or spec.origin is None:
        return False
    installed_file = packs.find(pack).file("patches", f"{spec.name.rpartition('.')[2]}.py")
    return installed_file is not None and Path(spec.origin).is_file() and installed_file.samefile(spec.origin)
