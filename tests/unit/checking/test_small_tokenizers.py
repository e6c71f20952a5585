from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from trl_hotfix.checking import small_tokenizers

tokenizers = pytest.importorskip("tokenizers")
SPECIAL = ["<pad>", "<end>"]
TEXTS = ["a bird flies", "Straße 漢字 🙂", "x = [1, 2]\n\treturn"]


def bpe(folder: Path) -> None:
    whole = tokenizers.Tokenizer(tokenizers.models.BPE())
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = tokenizers.decoders.ByteLevel()
    words = [f"{first}{second}{third} " for first in "abcdefghij" for second in "klmnopqrst" for third in "uvwxyzABCD"]
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=4000, initial_alphabet=letters, show_progress=False)
    whole.train_from_iterator([" ".join(words * 3), *("".join(pair) for pair in itertools.pairwise(words))], trainer)
    while whole.get_vocab_size() < 2 * small_tokenizers.KEPT + 10:
        whole.add_tokens([f"added{whole.get_vocab_size()}"])
    whole.add_special_tokens(SPECIAL)
    end = whole.token_to_id("<end>")
    whole.post_processor = tokenizers.processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", end)])
    whole.save(str(folder / "tokenizer.json"))


def unigram(folder: Path) -> None:
    letters = [(letter, -5.0) for letter in sorted(set("".join(TEXTS)))]
    words = [(f"word{number}", -10.0 - number / 1000) for number in range(3000)]
    whole = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), *letters, *words], unk_id=0))
    whole.add_special_tokens(SPECIAL)
    whole.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("write", [bpe, unigram])
def test_a_cut_tokenizer_reads_every_text(tmp_path: Path, write: object) -> None:
    source, target = tmp_path / "whole", tmp_path / "cut"
    source.mkdir()
    target.mkdir()
    assert callable(write)
    write(source)
    numbers = small_tokenizers.cut(source, target)
    whole, cut = (tokenizers.Tokenizer.from_file(str(each / "tokenizer.json")) for each in (source, target))
    assert cut.get_vocab_size() < whole.get_vocab_size() / 1.1
    for text in TEXTS:
        assert cut.decode(cut.encode(text).ids) == whole.decode(whole.encode(text).ids)
    for word in SPECIAL:
        assert numbers[whole.token_to_id(word)] == cut.token_to_id(word)
    assert max(cut.get_vocab().values()) < cut.get_vocab_size()


def test_a_small_one_stays(tmp_path: Path) -> None:
    whole = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    assert small_tokenizers.cut(tmp_path, tmp_path) == {}
