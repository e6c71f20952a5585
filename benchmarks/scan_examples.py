"""How much the scan leaves untold of TRL's own examples, scripts and notebooks, the more it is told.

    python -m benchmarks.scan_examples [--groups] [--bugs-of FILE]... RELEASE=CHECKOUT...

CHECKOUT has the folders ``examples``, ``trl/scripts`` and ``docs`` of the tag of that release. Each file is scanned
with nothing told; with the first command line that its text, or TRL's page of its command line, documents, and the
config of accelerate in it; with the folder of its model too; with versions of transformers and DeepSpeed too; and with
a dataset too. A file that documents no command line is told none.

Nothing is downloaded. The folder of a model has what the files of its family say, without weights: ``FAMILIES``. The
file of a dataset has a row in the format that the pages of TRL, or the text of the example, give it: ``DATASETS``. What
is not there is not told. ``--groups`` shows what the last scan still asks. ``--bugs-of``, with the ``patches.yaml`` and
``known.yaml`` of an older commit, counts the bugs of these files alone, which compares the scan with that of then.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import yaml
from click.testing import CliRunner

from trl_hotfix.catalogue import loading
from trl_hotfix.commands.scan import command as scan

WITH = {"0": "4.56.1", "1": "4.57.6"}
DEEPSPEED = "deepspeed==0.19.8"
NOTHING = "nothing"
Told = TypeVar("Told")


class Family(NamedTuple):
    """What the files of a model's folder say. Without ``tokens`` it has no tokenizer, and no generation config."""

    model_type: str
    ends: int | list[int] | None = None
    tokens: Mapping[str, int] = {}
    special: Mapping[str, str | None] = {}
    config: Mapping[str, Any] = {}
    generation: Mapping[str, Any] = {}


def _qwen(model_type: str) -> Family:
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    return Family(model_type, [151645, 151643], _QWEN_TOKENS, special, generation={"top_p": 0.8})


_QWEN_TOKENS = {"<|endoftext|>": 151643, "<|im_end|>": 151645}
_QWEN_BASE = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "bos_token": None}
_GPT_OSS = {"num_local_experts": 32, "router_aux_loss_coef": 0.9, "output_router_logits": False}
FAMILIES: Mapping[str, Family] = {
    r"Qwen2\.5-VL-": _qwen("qwen2_5_vl"),
    r"Qwen3-VL-\dB-Instruct": _qwen("qwen3_vl"),
    r"Qwen3-[\d.]+B(-Instruct-2507)?$": _qwen("qwen3"),
    r"Qwen2(\.5)?-(?!VL)[\w.-]*Instruct": _qwen("qwen2"),
    r"Qwen2(\.5)?-[\d.]+B$": Family("qwen2", 151643, _QWEN_TOKENS, _QWEN_BASE),
    r"Llama-3\.\d-[\d.]+B-Instruct": Family(
        "llama",
        [128001, 128008, 128009],
        {"<|begin_of_text|>": 128000, "<|eot_id|>": 128009},
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        generation={"top_p": 0.9},
    ),
    r"gemma-3-\d+b-it": Family(
        "gemma3",
        [1, 106],
        {"<pad>": 0, "<eos>": 1, "<bos>": 2},
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
        generation={"top_k": 64, "top_p": 0.95},
    ),
    r"gpt-oss-": Family(
        "gpt_oss",
        [200002, 199999, 200012],
        {"<|return|>": 200002, "<|endoftext|>": 199999},
        {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        _GPT_OSS,
    ),
    r"(^|/)gpt2$": Family(
        "gpt2", 50256, {"<|endoftext|>": 50256}, dict.fromkeys(["bos_token", "eos_token"], "<|endoftext|>")
    ),
    r"pythia-": Family("gpt_neox"),
    r"qwen1\.5-1\.8b-sft": Family("qwen2"),
    r"Qwen3\.5-[\d.]+B$": Family("qwen3_5"),
    r"LFM2(\.5)?-[\d.]+B": Family("lfm2"),
    r"tiny-aya-global": Family("cohere2"),
    r"llava-1\.5-": Family("llava"),
    r"Ministral-3-3B-Instruct": Family("mistral3"),
    r"NVIDIA-Nemotron-3-Nano": Family("nemotron_h", config={"n_routed_experts": 128}),
}
"""The families of the models that the examples name most, by a pattern of the name."""


_QUESTION = {"role": "user", "content": "What color is the sky?"}
_ANSWER = {"role": "assistant", "content": "It is blue."}
_BOTH = [_QUESTION, _ANSWER]
_PAIR = {"prompt": [_QUESTION], "chosen": [_ANSWER], "rejected": [_ANSWER]}
_UNPAIRED = {"prompt": [_QUESTION], "completion": [_ANSWER], "label": True}
DATASETS: Mapping[str, Mapping[str, Any]] = {
    r"Capybara$|chatbot_arena_completions$|codeforces-cots$|Multilingual-Thinking$": {"messages": _BOTH},
    r"ultrafeedback_binarized$|hh-rlhf-helpful-base-trl-style$": {"chosen": _BOTH, "rejected": _BOTH},
    r"kto-mix-14k$|ultrafeedback-gpt-3\.5-turbo-helpfulness$": _UNPAIRED,
    r"/tldr$": {"prompt": "The sky is", "completion": " blue."},
    r"prm800k$": {"prompt": "The sky is", "completions": [" blue."], "labels": [True]},
    r"rlaif-v_formatted$": {"images": ["sky.png"], **_PAIR},
    r"llava-instruct-mix-vsft$": {"images": ["sky.png"], "messages": _BOTH},
    r"trl-lib/llava-instruct-mix$": {"images": ["sky.png"], "prompt": [_QUESTION], "completion": [_ANSWER]},
}
"""The datasets that the examples name most, by a pattern of the name."""

# The example makes prompts of messages itself, which no message of the assistant ends.
_MAKES_PROMPTS = re.compile(r"""["']prompt\\?["']\s*:.*["']role\\?["']\s*:\s*\\?["'](system|user)""", re.DOTALL)


class Example(NamedTuple):
    """A file, and what can be told of it. ``words`` are those behind its name, or None if it documents none."""

    path: Path
    words: tuple[str, ...] | None
    accelerate: Path | None
    model: Family | None
    row: Mapping[str, Any] | None


def examples(checkout: Path) -> Iterator[Example]:
    for path in sorted(path for folder in ("examples", "trl/scripts") for path in (checkout / folder).rglob("*")):
        if path.suffix in (".py", ".ipynb"):
            text = path.read_text(encoding="utf-8")
            command = _documented(path.name, text) if path.suffix == ".py" else None
            if command is None and path.parent.name == "scripts" and path.parent.parent.name == "trl":
                command = _on_page(checkout, path.stem)
            launch, words = command or ((), None)
            config = _behind(launch, "--config_file")
            models = [_behind(words or (), "--model_name_or_path", "--model-id", "--model"), *_names(text)]
            datasets = [_behind(words or (), "--dataset_name"), *_names(text)]
            row = _only(datasets, DATASETS)
            if row is None and re.search(r"\b(GRPO|RLOO)Trainer\(", text) and _MAKES_PROMPTS.search(text):
                row = {"prompt": [_QUESTION], **({"image": "sky.png"} if "vlm" in path.name else {})}
            accelerate = checkout / config if config is not None and (checkout / config).exists() else None
            yield Example(path, words, accelerate, _only(models, FAMILIES), row)


def _documented(name: str, text: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the words before the name of the script in its first documented command line, and those behind."""
    lines = re.sub(r"\\\s*\n\s*", " ", ast.get_docstring(ast.parse(text)) or "").splitlines()
    for line in lines:
        if re.match(r"\s*(\w+=\S+ +)*(python|accelerate launch)\b", line) and f"/{name}" in line:
            words = shlex.split(line)
            place = next(place for place, word in enumerate(words) if word.endswith(f"/{name}"))
            return tuple(words[:place]), tuple(words[place + 1 :])
    return None


def _on_page(checkout: Path, name: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the words of the first ``trl grpo ...`` on TRL's page of its command line."""
    pages = (checkout / "docs" / "source").glob("clis.md*")
    text = re.sub(r"\\\s*\n\s*", " ", "".join(page.read_text(encoding="utf-8") for page in pages))
    found = re.search(rf"^trl {name} +(--.*)$", text, re.MULTILINE)
    return ((), tuple(shlex.split(found[1]))) if found is not None else None


def _behind(words: tuple[str, ...], *options: str) -> str | None:
    return next((value for word, value in pairwise(words) if word in options), None)


def _names(text: str) -> list[str]:
    text = "\n".join(line for line in text.splitlines() if not line.strip(' "').startswith("#"))
    quote = r'\\?["\']'
    return re.findall(rf"{quote}([\w.-]+/[\w.-]+){quote}", text)


def _only(names: Sequence[str | None], known: Mapping[str, Told]) -> Told | None:
    """Return what is known of the first name, which the command line has, or else of the only one of the text."""
    first, *others = names
    if first is not None:
        others = [first]
    found = [value for pattern, value in known.items() if any(re.search(pattern, name) for name in others if name)]
    return found[0] if len(found) == 1 else None


def write_model(family: Family, folder: Path) -> None:
    files: dict[str, Any] = {"config.json": {"model_type": family.model_type, **family.config}}
    if family.tokens:
        decoder = {str(number): {"content": token, "special": True} for token, number in family.tokens.items()}
        files["generation_config.json"] = {"eos_token_id": family.ends, **family.generation}
        files["tokenizer_config.json"] = {**family.special, "added_tokens_decoder": decoder}
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def untold(
    release: str, path: Path, options: list[str], words: tuple[str, ...] | None, bugs: Container[str]
) -> Counter[str]:
    """Return what the scan of a file cannot tell of these bugs: how often it asks for the same, and its answers."""
    arguments = [str(path), "--format", "json", "--fail-on", "never", "--trl", release, *options]
    result = CliRunner().invoke(scan, [*arguments, *(["--", *words] if words is not None else [])])
    if "is not Python" in result.output:
        return Counter(["not this Python"])
    if result.exit_code != 0:
        raise click.ClickException(f"{path}: {result.output}")
    counts: Counter[str] = Counter()
    for trainer in json.loads(result.stdout)["files"][0]["trainers"]:
        asked = [bug for bug in trainer["cannot_tell"] if bug["id"] in bugs]
        counts["hit"] += sum(bug["id"] in bugs for bug in trainer["hits"])
        counts["cannot tell"] += len(asked)
        counts["of"] += len(trainer["hits"]) + len(trainer["cannot_tell"]) + trainer["rest"]
        counts.update(f"asks {bug['id']}: {'; '.join(bug['unknown'])}" for bug in asked)
    return counts


def bugs_of(files: Sequence[Path]) -> set[str]:
    """Return the bugs of today that these files know, by their ids or by names of old; without files, all."""
    names = {patch.id: {patch.id, *patch.formerly} for patch in loading.load()}
    names |= {bug.id: {bug.id} for bug in loading.without_repair()}
    if not files:
        return set(names)
    known = {entry["id"] for file in files for entry in yaml.safe_load(file.read_text(encoding="utf-8"))}
    return {bug for bug, formerly in names.items() if formerly & known}


def measured(release: str, checkout: Path, bugs: Container[str]) -> dict[str, Counter[str]]:
    """Return the counts of all files, by what is told."""
    counts: dict[str, Counter[str]] = {}
    for example in examples(checkout):
        with tempfile.TemporaryDirectory() as folder:
            told: list[str] = []
            for step, options in _steps(release, example, Path(folder)).items():
                told += options
                words = example.words if step != NOTHING else None
                counts.setdefault(step, Counter()).update(untold(release, example.path, told, words, bugs))
    return counts


def _steps(release: str, example: Example, folder: Path) -> dict[str, list[str]]:
    """Return the options that each step adds."""
    model, dataset = folder / "model", folder / "train.jsonl"
    if example.model is not None:
        write_model(example.model, model)
    if example.row is not None:
        dataset.write_text(json.dumps(example.row), encoding="utf-8")
    return {
        NOTHING: [],
        "and the command line": ["--accelerate", str(example.accelerate)] if example.accelerate is not None else [],
        "and the model": ["--model", str(model)] if example.model is not None else [],
        "and the versions": ["--with", f"transformers=={WITH[release.partition('.')[0]]}", "--with", DEEPSPEED],
        "and the dataset": ["--dataset", str(dataset)] if example.row is not None else [],
    }


@click.command()
@click.option("--groups", is_flag=True, help="Show what the last scan asks.")
@click.option("--bugs-of", "files", type=click.Path(path_type=Path, exists=True), multiple=True, metavar="FILE")
@click.argument("checkouts", nargs=-1, required=True, metavar="RELEASE=CHECKOUT...")
def main(groups: bool, files: tuple[Path, ...], checkouts: tuple[str, ...]) -> None:
    """Count what the scan cannot tell of TRL's examples, the more it is told."""
    total: dict[str, Counter[str]] = {}
    bugs = bugs_of(files)
    for argument in checkouts:
        release, _, checkout = argument.partition("=")
        for told, counts in measured(release, Path(checkout), bugs).items():
            total.setdefault(told, Counter()).update(counts)
            click.echo(f"{release}, {told}: {_in_words(counts)}")
    for told, counts in total.items():
        click.echo(f"all, {told}: {_in_words(counts)}")
    if groups:
        for what, number in total[told].most_common():
            if what.startswith("asks "):
                click.echo(f"{number:4} {what.removeprefix('asks ')}")


def _in_words(counts: Counter[str]) -> str:
    return f"{counts['hit']} hit, {counts['cannot tell']} cannot tell, of {counts['of']} answers on all bugs"


if __name__ == "__main__":
    main()
