"""Run on a stack: what TRL's tests ask the Hugging Face hub for, tiny and made here.

    python hub.py FOLDER SETTINGS.yaml

``FOLDER`` becomes an ``HF_HOME``: models lie in it as downloads do, datasets as ``datasets`` caches them, so that the
names resolve offline and nothing has to be patched. The models have the architectures and the sizes of the real
ones; the texts are those of ``import this``, which is what the real dataset ``zen`` is made of too.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END, START, STOP, "<pad>", "<s>", "</s>", "<unk>")
REVISION = "0" * 40
CHAT = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{{- tools | tojson }}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "ANSWER"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
PLAIN = "{{- message['content'] }}"
# Marks what the assistant says, for the tests of losses on that alone.
MARKED = (
    "{%- if message['role'] == 'assistant' %}{% generation %}{{- message['content'] }}{% endgeneration %}"
    "{%- else %}{{- message['content'] }}{%- endif %}"
)
TOKENIZERS: dict[str, dict[str, Any]] = {
    "chat": {"eos_token": STOP, "pad_token": END, "chat_template": CHAT.replace("ANSWER", PLAIN)},
    "marked": {"eos_token": STOP, "pad_token": END, "chat_template": CHAT.replace("ANSWER", MARKED)},
    "llama": {
        "bos_token": "<s>",
        "eos_token": STOP,
        "chat_template": "{{- bos_token }}" + CHAT.replace("ANSWER", PLAIN),
    },
    "gpt2": {"bos_token": END, "eos_token": END, "unk_token": END},
    "seq2seq": {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
}


def zen() -> list[str]:
    """The nineteen lines of ``import this``."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this

    return codecs.decode(this.s, "rot13").splitlines()[2:]


def tokenizer(kind: str) -> Any:
    """A byte-level BPE with the special tokens and the chat template of this kind."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    words.train_from_iterator([*zen(), "user assistant system tool What is better than ugly?"], trainer)
    words.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    settings = TOKENIZERS[kind]
    if kind == "llama":
        first = settings["bos_token"]
        words.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, words.token_to_id(first))]
        )
    if kind == "seq2seq":
        words.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", words.token_to_id("</s>"))]
        )
    # By default it would make token_type_ids too, which the models do not take.
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=1024, model_input_names=names, **settings)


def model(kind: str, words: Any, settings: dict[str, Any]) -> Any | None:
    """A model of this class, always with the same weights; None if this transformers has no such class."""
    import torch
    import transformers

    its = getattr(transformers, kind, None)
    if its is None:
        return None
    torch.manual_seed(0)
    return its(its.config_class(vocab_size=len(words), **settings))


def snapshot(home: Path, name: str) -> Path:
    """The folder where the hub's client looks for the files of this model."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    (folder / "blobs").mkdir()
    return folder / "snapshots" / REVISION


def rows(config: str) -> list[dict[str, Any]]:
    """The dataset ``zen`` in one of its forms: ``standard_preference``, ``conversational_prompt_only``, ..."""
    style, _, kind = config.partition("_")

    def said(role: str, text: str) -> Any:
        return text if style == "standard" else [{"role": role, "content": text.strip()}]

    def both(prompt: str, text: str) -> Any:
        return prompt + text if style == "standard" else [*said("user", prompt), *said("assistant", text)]

    found = []
    for place, line in enumerate(zen()):
        words = line.split()
        half = max(1, len(words) // 2)
        prompt, good = " ".join(words[:half]), " " + " ".join(words[half:])
        bad = " the moon." if place % 2 else " better than nothing at all."
        question, better, worse = said("user", prompt), said("assistant", good), said("assistant", bad)
        found.append(
            {
                "language_modeling": {"text" if style == "standard" else "messages": both(prompt, good)},
                "prompt_only": {"prompt": question},
                "prompt_completion": {"prompt": question, "completion": better},
                "preference": {"prompt": question, "chosen": better, "rejected": worse},
                "implicit_prompt_preference": {"chosen": both(prompt, good), "rejected": both(prompt, bad)},
                "unpaired_preference": {
                    "prompt": question,
                    "completion": worse if place % 2 else better,
                    "label": not place % 2,
                },
                "stepwise_supervision": {
                    "prompt": prompt,
                    "completions": [", so far,", good],
                    "labels": [bool(place % 3), not place % 2],
                },
            }[kind]
        )
    return found


def tools() -> list[dict[str, Any]]:
    """Conversations in which a tool is called: the columns of the dataset ``toolcall``."""
    of_tool = {"name": "beauty", "description": "How beautiful", "parameters": {"type": "object"}}
    return [
        {
            "messages": [
                {"role": "user", "content": line},
                {"role": "assistant", "content": "I ask."},
                {"role": "tool", "content": str(place)},
                {"role": "assistant", "content": "So it is."},
            ],
            "tools": json.dumps([{"type": "function", "function": of_tool}]),
        }
        for place, line in enumerate(zen())
    ]


def harmony(kind: str) -> list[dict[str, Any]]:
    """What the dataset ``harmony`` has: an answer with a train of thought beside it."""
    found = []
    for line in zen():
        prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": line}]
        answer = [{"role": "assistant", "content": "So it is.", "thinking": "It is so."}]
        its = {"messages": prompt + answer} if kind == "language_modeling" else {"prompt": prompt, "completion": answer}
        found.append({**its, "reasoning_effort": "low", "model_identity": "You are Tiny."})
    return found


def put_dataset(home: Path, name: str, config: str, its: list[dict[str, Any]]) -> None:
    """Lay a dataset out, 17 rows to train and 2 to test, as ``datasets`` caches one that it has downloaded."""
    from datasets import Dataset, DatasetInfo, Split, SplitDict, SplitInfo
    from datasets.arrow_writer import ArrowWriter

    namespace, _, short = name.partition("/")
    folder = home / "datasets" / f"{namespace}___{short}" / config / "0.0.0" / REVISION
    folder.mkdir(parents=True)
    splits = SplitDict(dataset_name=short)
    whole = Dataset.from_list(its)
    for split, part in ((Split.TRAIN, whole.select(range(17))), (Split.TEST, whole.select(range(17, len(its))))):
        with ArrowWriter(path=str(folder / f"{short}-{split}.arrow"), features=whole.features) as writer:
            for row in part:
                writer.write(row)
            writer.finalize()
        splits.add(SplitInfo(str(split), num_examples=len(part), dataset_name=short))
    info = DatasetInfo(features=whole.features, splits=splits, builder_name="parquet", config_name=config)
    info.dataset_name = short
    info.version = "0.0.0"
    info.write_to_directory(str(folder))


def main(folder: str, settings: str) -> None:
    asked = yaml.safe_load(Path(settings).read_text())["hub"]
    home = Path(folder)
    shutil.rmtree(home, ignore_errors=True)
    made = {kind: tokenizer(kind) for kind in TOKENIZERS}
    for name, wanted in asked["models"].items():
        words = made[wanted["tokenizer"]]
        its = None
        if "class" in wanted:
            its = model(wanted["class"], words, {**asked["sizes"], **wanted.get("config", {})})
            if its is None:
                continue
        path = snapshot(home, name)
        words.save_pretrained(path)
        if its is not None:
            its.save_pretrained(path)
    # Without it transformers takes the folder for one of an older layout, and says so at each import.
    (home / "hub" / "version.txt").write_text("1")
    for style in ("standard", "conversational"):
        for kind in asked["zen"]:
            put_dataset(home, "trl-internal-testing/zen", f"{style}_{kind}", rows(f"{style}_{kind}"))
    put_dataset(home, "trl-internal-testing/toolcall", "default", tools())
    for kind in ("language_modeling", "prompt_completion"):
        put_dataset(home, "trl-internal-testing/harmony", kind, harmony(kind))


if __name__ == "__main__":
    main(*sys.argv[1:])
