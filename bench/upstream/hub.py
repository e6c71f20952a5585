"""Run on a stack: make tiny versions of what TRL's tests load from the Hugging Face hub.

    python -m bench.upstream.hub FOLDER SETTINGS.yaml

``FOLDER`` becomes an ``HF_HOME``: models have the layout of downloads, datasets that of the ``datasets`` cache, so the
names resolve offline and nothing has to be patched. The models have the architectures and sizes of the real ones; the
texts are those of ``import this``, as in the real dataset ``zen``.
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
# Marks the assistant's messages, for the tests of losses on them alone.
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
    """Return the nineteen lines of ``import this``."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this

    return codecs.decode(this.s, "rot13").splitlines()[2:]


def tokenizer(kind: str) -> Any:
    """Return a byte-level BPE with the special tokens and the chat template of this kind."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    byte_level_bpe = Tokenizer(models.BPE())
    byte_level_bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level_bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    byte_level_bpe.train_from_iterator([*zen(), "user assistant system tool What is better than ugly?"], trainer)
    byte_level_bpe.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    settings = TOKENIZERS[kind]
    if kind == "llama":
        first = settings["bos_token"]
        byte_level_bpe.post_processor = processors.TemplateProcessing(
            single=f"{first} $A",
            pair=f"{first} $A {first} $B",
            special_tokens=[(first, byte_level_bpe.token_to_id(first))],
        )
    if kind == "seq2seq":
        byte_level_bpe.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", byte_level_bpe.token_to_id("</s>"))]
        )
    # By default the tokenizer would return token_type_ids too, which the models do not take.
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe, model_max_length=1024, model_input_names=names, **settings
    )


def model(kind: str, tokenizer: Any, settings: dict[str, Any]) -> Any | None:
    """Return a model of this class, always with the same weights; None if this transformers has no such class."""
    import torch
    import transformers

    model_class = getattr(transformers, kind, None)
    if model_class is None:
        return None
    torch.manual_seed(0)
    return model_class(model_class.config_class(vocab_size=len(tokenizer), **settings))


def snapshot(home: Path, name: str) -> Path:
    """Make and return the folder where the hub's client looks for the files of this model."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    (folder / "blobs").mkdir()
    return folder / "snapshots" / REVISION


def rows(config: str) -> list[dict[str, Any]]:
    """Return the dataset ``zen`` in one form: ``standard_preference``, ``conversational_prompt_only``, ..."""
    style, _, kind = config.partition("_")

    def message(role: str, text: str) -> Any:
        return text if style == "standard" else [{"role": role, "content": text.strip()}]

    def conversation(prompt: str, text: str) -> Any:
        return prompt + text if style == "standard" else [*message("user", prompt), *message("assistant", text)]

    examples = []
    for index, line in enumerate(zen()):
        words = line.split()
        half = max(1, len(words) // 2)
        prompt, good = " ".join(words[:half]), " " + " ".join(words[half:])
        bad = " the moon." if index % 2 else " better than nothing at all."
        question, better, worse = message("user", prompt), message("assistant", good), message("assistant", bad)
        examples.append(
            {
                "language_modeling": {"text" if style == "standard" else "messages": conversation(prompt, good)},
                "prompt_only": {"prompt": question},
                "prompt_completion": {"prompt": question, "completion": better},
                "preference": {"prompt": question, "chosen": better, "rejected": worse},
                "implicit_prompt_preference": {
                    "chosen": conversation(prompt, good),
                    "rejected": conversation(prompt, bad),
                },
                "unpaired_preference": {
                    "prompt": question,
                    "completion": worse if index % 2 else better,
                    "label": not index % 2,
                },
                "stepwise_supervision": {
                    "prompt": prompt,
                    "completions": [", so far,", good],
                    "labels": [bool(index % 3), not index % 2],
                },
            }[kind]
        )
    return examples


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
    """Return the rows of the dataset ``harmony``: an answer with a ``thinking`` text beside it."""
    rows = []
    for line in zen():
        prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": line}]
        answer = [{"role": "assistant", "content": "So it is.", "thinking": "It is so."}]
        example = (
            {"messages": prompt + answer} if kind == "language_modeling" else {"prompt": prompt, "completion": answer}
        )
        rows.append({**example, "reasoning_effort": "low", "model_identity": "You are Tiny."})
    return rows


def put_dataset(home: Path, name: str, config: str, rows: list[dict[str, Any]]) -> None:
    """Write a dataset, 17 rows to train and 2 to test, as ``datasets`` caches a download."""
    from datasets import Dataset, DatasetInfo, Split, SplitDict, SplitInfo
    from datasets.arrow_writer import ArrowWriter

    namespace, _, short = name.partition("/")
    folder = home / "datasets" / f"{namespace}___{short}" / config / "0.0.0" / REVISION
    folder.mkdir(parents=True)
    splits = SplitDict(dataset_name=short)
    dataset = Dataset.from_list(rows)
    for split, part in ((Split.TRAIN, dataset.select(range(17))), (Split.TEST, dataset.select(range(17, len(rows))))):
        with ArrowWriter(path=str(folder / f"{short}-{split}.arrow"), features=dataset.features) as writer:
            for row in part:
                writer.write(row)
            writer.finalize()
        splits.add(SplitInfo(str(split), num_examples=len(part), dataset_name=short))
    info = DatasetInfo(features=dataset.features, splits=splits, builder_name="parquet", config_name=config)
    info.dataset_name = short
    info.version = "0.0.0"
    info.write_to_directory(str(folder))


def main(folder: str, settings: str) -> None:
    hub = yaml.safe_load(Path(settings).read_text())["hub"]
    home = Path(folder)
    shutil.rmtree(home, ignore_errors=True)
    tokenizers = {kind: tokenizer(kind) for kind in TOKENIZERS}
    for name, spec in hub["models"].items():
        hub_tokenizer = tokenizers[spec["tokenizer"]]
        hub_model = None
        if "class" in spec:
            hub_model = model(spec["class"], hub_tokenizer, {**hub["sizes"], **spec.get("config", {})})
            if hub_model is None:
                continue
        path = snapshot(home, name)
        hub_tokenizer.save_pretrained(path)
        if hub_model is not None:
            hub_model.save_pretrained(path)
    # Without this file transformers takes the folder for an older layout, and warns at each import.
    (home / "hub" / "version.txt").write_text("1")
    for style in ("standard", "conversational"):
        for kind in hub["zen"]:
            put_dataset(home, "trl-internal-testing/zen", f"{style}_{kind}", rows(f"{style}_{kind}"))
    put_dataset(home, "trl-internal-testing/toolcall", "default", tools())
    for kind in ("language_modeling", "prompt_completion"):
        put_dataset(home, "trl-internal-testing/harmony", kind, harmony(kind))


if __name__ == "__main__":
    main(*sys.argv[1:])
