"""Run the examples of docs/quickstart.md, which are on standard input as JSON, one after the other in this folder.

The folder gets a tiny model under each name that they use, and a file with data of each kind.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    make_models()
    make_data()
    for name, example in json.load(sys.stdin).items():
        began = time.monotonic()
        exec(compile(example, name, "exec"), {"__name__": "__main__"})
        print(f"ran {name} in {time.monotonic() - began:.1f} s", flush=True)


def make_models() -> None:
    import tiny

    for seed, name in enumerate(("my-model", "my-teacher")):
        tokenizer = tiny.chat_tokenizer()
        tokenizer.padding_side = "left"
        # Older trainers of preferences begin each prompt with this token, whether there is one or not.
        tokenizer.bos_token = "w57"
        tokenizer.model_max_length = 64
        tokenizer.save_pretrained(name)
        tiny.llama(".", seed=seed).save_pretrained(name)


def make_data() -> None:
    import tiny

    pairs = tiny.preferences().to_list()
    chats = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}] for row in pairs
    ]
    data: dict[str, list[dict[str, Any]]] = {
        "texts": [{"text": row["prompt"] + row["chosen"]} for row in pairs],
        "pairs": pairs,
        "labels": tiny.labelled().to_list(),
        "prompts": [{"prompt": row["prompt"]} for row in pairs],
        "chats": [{"messages": messages} for messages in chats],
    }
    for name, rows in data.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
