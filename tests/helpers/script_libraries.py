"""Stand-ins for the libraries that training scripts import beside TRL: just enough for the scripts of a corpus."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml


class Made:
    """An object of a library. It has every method, which returns the object, and remembers what it was made with."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.made_with = named

    @classmethod
    def from_pretrained(cls, *given: Any, **named: Any) -> Made:
        return cls(*given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **named: contextlib.nullcontext() if name.endswith("first") else self

    def __getitem__(self, key: Any) -> Made:
        return self

    def __call__(self, *given: Any, **named: Any) -> Made:
        return self

    def __enter__(self) -> Made:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Library(ModuleType):
    """A module with its names in ``__all__``."""

    __all__: list[str]

    def add(self, *values: Any) -> None:
        for value in values:
            setattr(self, value.__name__, value)
        self.__all__ = [name for name in vars(self) if not name.startswith("_")]

    def classes(self, *names: str) -> Library:
        self.add(*(type(name, (Made,), {"__module__": self.__name__}) for name in names))
        return self


def libraries() -> dict[str, ModuleType]:
    """Return the modules by their names."""
    modules: list[Library] = [
        Library("accelerate").classes("PartialState", "Accelerator"),
        Library("transformers").classes("AutoModelForCausalLM", "AutoTokenizer", "BitsAndBytesConfig"),
        Library("datasets").classes("Dataset"),
        Library("peft").classes("LoraConfig", "PeftModel", "AutoPeftModelForCausalLM"),
        *_torch(),
        *_hydra(),
        *_typer(),
    ]
    found = {module.__name__: module for module in modules}
    found["datasets"].load_dataset = lambda *given, **named: found["datasets"].Dataset()
    found["peft"].get_peft_model = lambda model, config: found["peft"].PeftModel()
    found["transformers"].HfArgumentParser = _parser_of_transformers()
    return dict(found)


def _torch() -> list[Library]:
    torch = Library("torch")
    for name in ("bfloat16", "float16", "float32"):
        setattr(torch, name, name)
    return [torch]


def _parser_of_transformers() -> Any:
    try:
        return importlib.import_module("transformers.hf_argparser").HfArgumentParser
    except ModuleNotFoundError:
        return None


class _Settings(dict[str, Any]):
    """A config of OmegaConf."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _settings(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _Settings({key: _settings(part) for key, part in value.items()})
    return value


def _overridden(config: _Settings, words: list[str]) -> _Settings:
    for word in words:
        path, _, text = word.partition("=")
        *owners, last = path.lstrip("+").split(".")
        owner = config
        for name in owners:
            owner = owner.setdefault(name, _Settings())
        owner[last] = yaml.safe_load(text)
    return config


def _hydra() -> list[Library]:
    def main(version_base: Any = None, config_path: str = ".", config_name: str = "config") -> Any:
        def decorate(function: Callable[[Any], None]) -> Callable[[], None]:
            def start() -> None:
                folder = Path(function.__code__.co_filename).parent / config_path
                config = _settings(yaml.safe_load((folder / f"{config_name}.yaml").read_text()))
                function(_overridden(config, sys.argv[1:]))

            return start

        return decorate

    @contextlib.contextmanager
    def initialize(config_path: str = ".", version_base: Any = None) -> Iterator[None]:
        # Hydra goes from the file that calls it; scripts of the corpus run in their folders.
        hydra._folder = Path(config_path)  # type: ignore[attr-defined]
        yield

    def compose(config_name: str, overrides: Sequence[str] = ()) -> Any:
        text = (hydra._folder / f"{config_name}.yaml").read_text()
        return _overridden(_settings(yaml.safe_load(text)), list(overrides))

    def instantiate(config: _Settings, **more: Any) -> Any:
        given = {**config, **more}
        module, _, name = given.pop("_target_").rpartition(".")
        return getattr(importlib.import_module(module), name)(**given)

    class OmegaConf:
        @staticmethod
        def load(path: str) -> Any:
            return _settings(yaml.safe_load(Path(path).read_text()))

        @staticmethod
        def from_cli() -> Any:
            return _overridden(_Settings(), sys.argv[1:])

        @staticmethod
        def merge(*configs: _Settings) -> Any:
            return _Settings({key: value for config in configs for key, value in config.items()})

    hydra, utils, omegaconf = Library("hydra"), Library("hydra.utils"), Library("omegaconf")
    hydra.add(main, initialize, compose)
    utils.add(instantiate)
    omegaconf.add(OmegaConf)
    hydra.utils = utils  # type: ignore[attr-defined]
    return [hydra, utils, omegaconf]


def _typer() -> list[Library]:
    def run(function: Callable[..., None]) -> None:
        parameters = inspect.signature(function).parameters.values()
        given = {parameter.name: parameter.default for parameter in parameters}
        kinds = {name: type(default) for name, default in given.items()}
        words = [part for word in sys.argv[1:] for part in word.split("=")]
        while words:
            name = words.pop(0).removeprefix("--").replace("-", "_")
            if kinds.get(name.removeprefix("no_")) is bool:
                given[name.removeprefix("no_")] = not name.startswith("no_")
            else:
                given[name] = kinds[name](words.pop(0))
        function(**given)

    class Typer:
        def command(self) -> Callable[[Any], Any]:
            def keep(function: Any) -> Any:
                self._function = function
                return function

            return keep

        def __call__(self) -> None:
            run(self._function)

    def Option(default: Any = None, *names: str) -> Any:
        return default

    typer, fire = Library("typer"), Library("fire")
    typer.add(run, Typer, Option)
    fire.Fire = run  # type: ignore[attr-defined]
    return [typer, fire]
