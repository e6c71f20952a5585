"""``LlamaTokenizer`` of transformers 5 splits text as Llama 2 does, whatever ``tokenizer.json`` says.

Llama 3, DeepSeek and their distillations are byte-level: a space before a word is ``Ġ``. Many of them have
``tokenizer_class: LlamaTokenizerFast`` in ``tokenizer_config.json``, which transformers 4 read ``tokenizer.json`` for.
transformers 5 makes ``LlamaTokenizer`` of the vocabulary and merges alone. It writes ``▁`` for a space, no merge has
that, and spaces and line breaks are lost without an error. ``AutoTokenizer`` takes another class from 5.22 on.

A trainer is given its tokenizers, or loads them by ``AutoTokenizer`` or ``AutoProcessor`` of its module.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from ...authoring import Call, absent, judge, module_of, wrapper
from ...model import Outcome
from ...testing import StopConstruction, absent_if_reexported

_log = logging.getLogger("trl_hotfix")
_LOADERS = ("AutoTokenizer", "AutoProcessor")


@wrapper
def read_tokenizer_json(call: Call) -> Any:
    """Let the tokenizers that the trainer is given or loads split text as their ``tokenizer.json`` says."""
    for name in ("processing_class", "reward_processing_classes"):
        with suppress(KeyError):  # A trainer without reward models.
            given = call[name]
            for processing_class in given if isinstance(given, list) else [given]:
                _mend(processing_class, call)
    module = module_of(call.__wrapped__)
    with ExitStack() as stack:
        for name in vars(module).keys() & set(_LOADERS):
            stack.enter_context(patch.object(module, name, _mending(getattr(module, name), call)))
        return call()


def _mending(loader: Any, call: Call) -> Any:
    def from_pretrained(*args: Any, **options: Any) -> Any:
        loaded = loader.from_pretrained(*args, **options)
        _mend(loaded, call)
        return loaded

    return SimpleNamespace(from_pretrained=from_pretrained)


def _mend(processing_class: Any, call: Call) -> None:
    """Give a byte-level tokenizer that splits at ``▁`` the model and the steps of its ``tokenizer.json``."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "pre_tokenizer", None)).__name__ != "Metaspace" or backend.token_to_id("Ġ") is None:  # type: ignore[union-attr]
        return
    shipped = _shipped(tokenizer.name_or_path)
    if shipped is None and backend.token_to_id("▁") is not None:  # type: ignore[union-attr]
        return  # Like Llama 2, whose vocabulary has both.
    if shipped is None or shipped.get_vocab() != {token: backend.token_to_id(token) for token in shipped.get_vocab()}:  # type: ignore[union-attr]
        _log.warning(
            "The tokenizer %r is byte-level, and transformers reads it as Llama 2's: it loses spaces and line breaks. "
            "Its tokenizer.json was not found, or has another vocabulary, so nothing is repaired. Load it with "
            "PreTrainedTokenizerFast.from_pretrained",
            tokenizer.name_or_path,
        )
    elif type(shipped.decoder).__name__ == "ByteLevel":
        call.act()
        backend.model, backend.normalizer = shipped.model, shipped.normalizer  # type: ignore[union-attr]
        backend.pre_tokenizer, backend.decoder = shipped.pre_tokenizer, shipped.decoder  # type: ignore[union-attr]


def _shipped(name: str) -> Any:
    """Return the tokenizer of the ``tokenizer.json`` in this folder, or in the cache for this name. Or None."""
    from tokenizers import Tokenizer
    from transformers.utils import cached_file

    with suppress(OSError):
        return Tokenizer.from_file(cached_file(name, "tokenizer.json", local_files_only=True)) if name else None
    return None


def spaces_are_kept(module: ModuleType) -> Outcome:
    """Give a byte-level tokenizer to the constructor, and encode: 1 if the space before a word is kept, or 0."""
    import inspect
    import json
    import tempfile
    from pathlib import Path

    import transformers
    from datasets import Dataset
    from packaging.version import Version
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    class Stopping:
        def __getattr__(self, name: str) -> Any:
            raise StopConstruction

    class_name = module.__name__.rpartition(".")[2].replace("_", "")
    trainer_class = next(value for name, value in vars(module).items() if name.lower() == class_name)
    if (reexported := absent_if_reexported(module, trainer_class.__init__)) is not None:
        return reexported
    parameters = inspect.signature(trainer_class.__init__).parameters
    if "processing_class" not in parameters or Version(transformers.__version__) < Version("5"):
        return absent("transformers 4 reads tokenizer.json, and a class with an older name hands its arguments on")
    shipped = Tokenizer(models.BPE({"a": 0, "b": 1, "Ġ": 2, "Ġb": 3}, [("Ġ", "b")]))
    shipped.pre_tokenizer, shipped.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    others = {"args": Stopping(), **({"reward_funcs": len} if "reward_funcs" in parameters else {})}
    # To make a real dataset takes longer than all else.
    rows = object.__new__(type("Rows", (Dataset,), {"column_names": []}))  # type: ignore[var-annotated]
    with tempfile.TemporaryDirectory() as folder, suppress(StopConstruction):
        shipped.save(f"{folder}/tokenizer.json")
        Path(folder, "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
        tokenizer = transformers.LlamaTokenizer.from_pretrained(folder)
        trainer_class.__init__(
            object.__new__(trainer_class), Stopping(), processing_class=tokenizer, train_dataset=rows, **others
        )
    return judge(float(3 in tokenizer("a b")["input_ids"]), right=1.0, wrong=0.0)
