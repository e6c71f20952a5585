"""A byte-level tokenizer keeps spaces and line breaks in each trainer; others are left as they are."""

from __future__ import annotations

import importlib
import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trl_hotfix.testing import StopConstruction

import tiny

ID = "byte-level-tokenizer-loses-spaces"
PARTS = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "Ġ": 4, "Ċ": 5, "Ġb": 6, "ab": 7}
RIGHT, WRONG = [2, 6, 5, 3], [2, 3, 3]
"""What ``a b\\nb`` is."""
OTHERS = {"DPO": "dpo", "GRPO": "grpo", "RLOO": "rloo", "Reward": "reward"}
MODULES = {name: importlib.import_module(f"trl.trainer.{part}_trainer") for name, part in OTHERS.items()}
SFT = importlib.import_module("trl.trainer.sft_trainer")


@pytest.fixture
def written(tmp_path: Path) -> Any:
    return lambda **changed: write(tmp_path, **changed)


def write(
    folder: Path, *, vocabulary: Any = None, byte_level: bool = True, shipped: bool = True, **settings: Any
) -> Any:
    """Return a ``LlamaTokenizer`` of the folder, which has a ``tokenizer.json``, or none any more."""
    tokenizer = Tokenizer(models.BPE(vocabulary or PARTS, [("Ġ", "b")], ignore_merges=True))
    if byte_level:
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **settings}))
    loaded = transformers.LlamaTokenizer.from_pretrained(str(folder))
    if not shipped:
        (folder / "tokenizer.json").unlink()
    return loaded


class Stopping:
    """A config that ends the constructor where it is asked for something."""

    def __getattr__(self, name: str) -> Any:
        raise StopConstruction


def begun(name: str, tokenizer: Any, **others: Any) -> None:
    """Begin to make a trainer of this name. Its constructor raises, so no act is counted."""
    trainer_class = getattr(MODULES.get(name, SFT), f"{name}Trainer")
    rows = object.__new__(type("Rows", (importlib.import_module("datasets").Dataset,), {"column_names": []}))
    if name in ("GRPO", "RLOO"):
        others = {"reward_funcs": [len], **others}
    trainer = object.__new__(trainer_class)
    with suppress(StopConstruction):
        trainer.__init__(Stopping(), args=Stopping(), processing_class=tokenizer, train_dataset=rows, **others)


def acts(name: str, trainer: Any) -> int | None:
    module = MODULES.get(name, SFT)
    return tiny.acts(ID, f"{module.__name__}:{name}Trainer.__init__", trainer)


def ids(tokenizer: Any, text: str = "a b\nb") -> list[int]:
    found: list[int] = tokenizer(text)["input_ids"]
    return found


@pytest.mark.parametrize("name", ["SFT", *OTHERS])
def test_the_tokenizer_of_a_trainer_keeps_spaces_and_line_breaks(written: Any, name: str) -> None:
    tokenizer = written()
    assert ids(tokenizer) == WRONG
    begun(name, tokenizer)
    assert ids(tokenizer) == RIGHT
    assert tokenizer.decode(RIGHT) == "a b\nb"


def test_without_the_patch_spaces_are_lost(written: Any, switch: Any) -> None:
    tokenizer = written()
    with switch.off():
        begun("SFT", tokenizer)
    assert ids(tokenizer) == WRONG


def test_a_second_trainer_finds_nothing_to_do(written: Any) -> None:
    tokenizer = written()
    begun("SFT", tokenizer)
    begun("DPO", tokenizer)
    assert ids(tokenizer) == RIGHT


def test_the_model_of_tokenizer_json_is_taken_too(written: Any) -> None:
    """A word of the vocabulary that no merge makes is one token, as Llama 3 has it."""
    tokenizer = written()
    assert ids(tokenizer, "ab") == [2, 3]
    begun("SFT", tokenizer)
    assert ids(tokenizer, "ab") == [7]


def test_a_normalizer_of_tokenizer_json_is_taken_too(tmp_path: Path) -> None:
    tokenizer = write(tmp_path)
    shipped = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**shipped, "normalizer": {"type": "Lowercase"}}))
    begun("SFT", tokenizer)
    assert ids(tokenizer, "A B\nb") == RIGHT


def test_what_the_user_has_set_stays(written: Any) -> None:
    tokenizer = written()
    tokenizer.add_tokens(["<new>"])
    new = tokenizer.convert_tokens_to_ids("<new>")
    tokenizer.padding_side, tokenizer.chat_template = "left", "{{ messages }}"
    begun("SFT", tokenizer)
    assert ids(tokenizer, "a<new> b<eos>") == [2, new, 6, 1]
    assert (tokenizer.padding_side, tokenizer.chat_template, len(tokenizer)) == ("left", "{{ messages }}", new + 1)


def test_the_tokenizer_of_a_processor_is_repaired(written: Any) -> None:
    processor = SimpleNamespace(tokenizer=written())
    begun("SFT", processor)
    assert ids(processor.tokenizer) == RIGHT


@pytest.mark.parametrize("listed", [True, False], ids=["a list", "one"])
def test_the_tokenizers_of_reward_models_are_repaired(written: Any, listed: bool) -> None:
    reward = written()
    begun("GRPO", None, reward_processing_classes=[None, reward] if listed else reward)
    assert ids(reward) == RIGHT


@pytest.mark.parametrize("name", ["Reward", "SFT"])
def test_what_trl_loads_is_repaired(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: Any, name: str
) -> None:
    """SFT loads it by ``AutoProcessor``, and Reward by ``AutoTokenizer``."""
    module, loader = MODULES.get(name, SFT), "AutoTokenizer" if name == "Reward" else "AutoProcessor"
    if not hasattr(module, loader):
        pytest.skip("in this release the trainer loads no tokenizer")
    calls: list[Any] = []

    def load(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return written()

    before = SimpleNamespace(from_pretrained=load)
    monkeypatch.setattr(module, loader, before)
    rows = [{"text": "a b\nb"}] if name == "SFT" else [{"chosen": "a b\nb", "rejected": "a b"}]
    model = tiny.llama(str(tmp_path), seed=0) if name == "SFT" else classifier()
    trainer_class, config_class = tiny.classes(name)

    def made() -> Any:
        args = tiny.config(config_class, max_length=16)
        return trainer_class(model, args, train_dataset=importlib.import_module("datasets").Dataset.from_list(rows))

    trainer = made()
    column = "input_ids" if name == "SFT" else "chosen_input_ids"
    column = column if column in trainer.train_dataset.column_names else "chosen_ids"
    assert trainer.train_dataset[0][column] == [*RIGHT, 1]
    assert len(calls) == 1
    assert getattr(module, loader) is before
    assert acts(name, trainer) == 1
    with switch.off():
        assert made().train_dataset[0][column] == [*WRONG, 1]


def classifier() -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=2, num_labels=1, pad_token_id=0, **sizes)
    return transformers.LlamaForSequenceClassification(config)


def test_a_tokenizer_like_llama_2_s_stays(written: Any, messages: list[str]) -> None:
    """It splits at ▁ in its ``tokenizer.json`` too, and may have Ġ as a letter."""
    vocabulary = {**PARTS, "▁": 8}
    for settings in ({"byte_level": False}, {"shipped": False}):
        tokenizer = written(vocabulary=vocabulary, **settings)
        before = tokenizer.backend_tokenizer.to_str()
        begun("SFT", tokenizer)
        assert tokenizer.backend_tokenizer.to_str() == before
    assert messages == []


def test_a_tokenizer_without_the_letter_of_byte_level_ones_is_not_looked_up(written: Any, messages: list[str]) -> None:
    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    begun("SFT", fast)
    assert messages == []


def test_other_tokenizers_stay(written: Any, messages: list[str]) -> None:
    folder = written().name_or_path
    healthy = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    before = healthy.backend_tokenizer.to_str()
    for each in (healthy, None, SimpleNamespace(pad_token_id=0)):
        begun("SFT", each)
    assert healthy.backend_tokenizer.to_str() == before
    assert messages == []


@pytest.mark.parametrize("why", ["no file", "no name", "another vocabulary"])
def test_what_cannot_be_repaired_is_said(written: Any, messages: list[str], why: str) -> None:
    tokenizer = written(shipped=why != "no file")
    if why == "no name":
        tokenizer.name_or_path = ""
    elif why == "another vocabulary":
        Path(tokenizer.name_or_path, "tokenizer.json").unlink()
        other = Tokenizer(models.BPE({**PARTS, "a": 3, "b": 2}, [("Ġ", "b")]))
        other.decoder = decoders.ByteLevel()
        other.save(f"{tokenizer.name_or_path}/tokenizer.json")
    begun("SFT", tokenizer)
    assert ids(tokenizer) == WRONG
    assert messages == [
        f"The tokenizer {tokenizer.name_or_path!r} is byte-level, and transformers reads it as Llama 2's: it loses "
        "spaces and line breaks. Its tokenizer.json was not found, or has another vocabulary, so nothing is repaired. "
        "Load it with PreTrainedTokenizerFast.from_pretrained"
    ]


def test_a_copy_and_a_saved_one_keep_the_repair(written: Any, tmp_path: Path) -> None:
    import copy
    import pickle

    tokenizer = written()
    begun("SFT", tokenizer)
    for each in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert ids(each) == RIGHT
    tokenizer.save_pretrained(tmp_path / "saved")
    assert ids(transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")) == RIGHT


def test_a_byte_level_tokenizer_that_also_has_the_mark_of_llama_2_is_repaired(written: Any) -> None:
    tokenizer = written(vocabulary={**PARTS, "▁": 8})
    begun("SFT", tokenizer)
    assert ids(tokenizer) == RIGHT


def test_only_the_cache_is_asked_for_a_name(written: Any, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def cached_file(name: str, file: str, **options: Any) -> str:
        asked.append((name, file, options))
        raise OSError("not in the cache")

    monkeypatch.setattr(transformers.utils, "cached_file", cached_file)
    for name in ("an-org/a-model", ""):
        tokenizer = written()
        tokenizer.name_or_path = name
        begun("SFT", tokenizer)
        assert ids(tokenizer) == WRONG
    assert asked == [("an-org/a-model", "tokenizer.json", {"local_files_only": True})]
    assert len(messages) == 2
