"""What a script loads: make models and tokenizers small, and look up rows of the hub on this machine."""

from __future__ import annotations

import functools
import os
import zlib
from pathlib import Path
from typing import Any

from . import families
from .environment import Redirect
from .small_folders import CannotBeSmallError, NotHereError, SmallFolders

LOADING = frozenset(
    {
        *("torch_dtype", "dtype", "device_map", "quantization_config", "load_in_4bit", "load_in_8bit", "cache_dir"),
        *("low_cpu_mem_usage", "revision", "token", "use_auth_token", "trust_remote_code", "local_files_only"),
        *("subfolder", "state_dict", "output_loading_info", "tp_plan", "use_safetensors", "variant", "max_memory"),
        *("offload_folder", "offload_state_dict", "force_download", "proxies", "adapter_kwargs", "key_mapping"),
        *("attn_implementation", "use_flash_attention_2", "ignore_mismatched_sizes", "weights_only", "kernel_config"),
    }
)
"""Arguments that say how weights are loaded. A small model has no weights on disk."""

TAKEN: list[str] = []
"""The things that we made small, in words."""

DTYPE = "_trl_hotfix_check_dtype"


class Loading:
    """Stands in place of ``from_pretrained`` of models, tokenizers and configs."""

    def __init__(self, folders: SmallFolders, redirect: Redirect) -> None:
        self._folders, self._redirect = folders, redirect

    def install(self) -> None:
        import transformers
        from transformers.models.auto import auto_factory, modeling_auto
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        for owner, name in (
            (transformers.PretrainedConfig, "get_config_dict"),
            (transformers.GenerationConfig, "from_pretrained"),
            (transformers.AutoTokenizer, "from_pretrained"),
            (transformers.AutoProcessor, "from_pretrained"),
            (PreTrainedTokenizerBase, "from_pretrained"),
        ):
            self._wrap(owner, name)
        # Each has a method of its own.
        for owner in vars(modeling_auto).values():
            is_auto = isinstance(owner, type) and issubclass(owner, auto_factory._BaseAutoModelClass)
            if is_auto and "from_pretrained" in vars(owner):
                self._wrap(owner, "from_pretrained")
        loaded = vars(transformers.PreTrainedModel)["from_pretrained"].__func__
        folders = self._folders

        @functools.wraps(loaded)
        def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._found(name)
            if found not in folders.names:
                return _as_float(loaded(cls, found, *args, **_on_cpu(kwargs)))
            return made(cls, Path(found), folders.names[found], kwargs)

        transformers.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
        _shrink_what_is_built(transformers.PreTrainedModel)

    def _found(self, name: Any) -> Any:
        """Return the small folder of a name, or the one that is loaded as it is."""
        if not isinstance(name, (str, os.PathLike)) or str(name) in self._folders.names:
            return name
        path = str(self._redirect.read(os.fspath(name)))
        found = self._folders.of(path)
        return str(found) if found is not None else path

    def _wrap(self, owner: Any, method: str) -> None:
        from transformers.models.auto import auto_factory

        auto_models = auto_factory._BaseAutoModelClass
        own = vars(owner)[method]
        original = own.__func__

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            first = 1 if isinstance(own, classmethod) else 0
            if issubclass(owner, auto_models):
                kwargs = _on_cpu(kwargs)
            key = next(
                (key for key in ("pretrained_model_name_or_path", "pretrained_model_name") if key in kwargs), None
            )
            name = kwargs[key] if key else args[first]
            place = self._found(name)
            if key:
                kwargs[key] = place
            else:
                args = (*args[:first], place, *args[first + 1 :])
            found = original(*args, **kwargs)
            if place != name:
                _rename(found, str(name))
            return found

        setattr(owner, method, classmethod(load) if isinstance(own, classmethod) else staticmethod(load))


def _rename(found: Any, name: str) -> None:
    """Give a loaded object the name that the script knows."""
    for each in found if isinstance(found, tuple) else (found,):
        if isinstance(each, dict):
            each["_name_or_path"] = name
        elif hasattr(each, "name_or_path"):
            each.name_or_path = name


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    dropped = {
        "low_cpu_mem_usage",
        "use_flash_attention_2",
        "device_map",
        "quantization_config",
        "load_in_4bit",
        "load_in_8bit",
        "max_memory",
        "tp_plan",
    }
    kept = {name: value for name, value in kwargs.items() if name not in dropped}
    if kept.get("attn_implementation") not in (None, "eager", "sdpa"):
        kept.pop("attn_implementation")
    return kept


def _as_float(found: Any) -> Any:
    """Return a loaded object in float32. It may be a model with a report."""
    return (found[0].float(), *found[1:]) if isinstance(found, tuple) else found.float()


def made(cls: Any, folder: Path, name: str, kwargs: dict[str, Any]) -> Any:
    """Return a small model with random weights, the same in every run."""
    import torch
    from transformers import AutoConfig, GenerationConfig

    dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
    attention = kwargs.get("attn_implementation")
    config = kwargs.pop("config", None)
    rest = {key: value for key, value in kwargs.items() if key not in LOADING}
    if config is None:
        config, rest = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **rest)
    elif families.weights_of(config) > families.LARGE:
        shrink(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        if getattr(config, "_attn_implementation", None) not in (None, "eager", "sdpa"):
            config._attn_implementation = "sdpa"
        chosen = {"attn_implementation": attention} if attention in ("eager", "sdpa") else {}
        model = cls._from_config(config, **chosen, **rest) if hasattr(cls, "_from_config") else cls(config, **rest)
    model = model.float().eval()
    model.config._name_or_path = name
    model.name_or_path = name
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    setattr(model, DTYPE, dtype)
    return (model, {}) if kwargs.get("output_loading_info") else model


def shrink(config: Any) -> None:
    """Make a large config small, in place. Raises ``CannotBeSmallError``."""
    try:
        fields = families.small(config.to_dict())
    except ValueError as error:
        raise CannotBeSmallError(f"a model of {type(config).__name__} cannot be made small: {error}") from error
    for name, value in fields.items():
        if name not in ("model_type", "transformers_version", "architectures") and getattr(config, name, None) != value:
            setattr(config, name, value)


def _shrink_what_is_built(model_class: Any) -> None:
    """Make a model small, too, if the script builds it of a large config."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers import PretrainedConfig

        config = args[0] if args else kwargs.get("config")
        if isinstance(config, PretrainedConfig) and families.weights_of(config) > families.LARGE:
            shrink(config)
            TAKEN.append(f"{cls.__name__}: two layers")
        return object.__new__(cls)

    model_class.__new__ = staticmethod(new)


def install(folder: Path, task: dict[str, Any]) -> None:
    """Make small what a script loads."""
    redirect = Redirect(folder)
    redirect.install()
    folders = SmallFolders(folder.parent / "models", task["configs"], online=task["online"])
    folders.taken = TAKEN
    Loading(folders, redirect).install()
    from . import loaded_rows

    loaded_rows.install(task["rows"], TAKEN, online=task["online"], whole=task["whole"])


__all__ = ["TAKEN", "CannotBeSmallError", "NotHereError", "install"]
