"""Where a name gets its value: a conditional or repeated assignment leaves it unknown."""

from __future__ import annotations

from typing import Any

import pytest

DROPPED = "dpo-precomputed-ref-logps-dropped"


def test_values_of_a_parser_are_not_in_the_text(scan: Any) -> None:
    (trainer,) = scan(
        """\
        from trl import DPOConfig, DPOTrainer, TrlParser
        def main(script_args, model_args):
            trainer = DPOTrainer(model_args.model_name_or_path, args=training_args)
        if __name__ == "__main__":
            parser = TrlParser((DPOConfig,))
            script_args, training_args, model_args = parser.parse_args_and_config()
            main(script_args, model_args)
        """
    )
    reason = "precompute_ref_log_probs is unknown: training_args is a part of parser.parse"
    assert reason in trainer.unknown[DROPPED]
    assert "line 6" in trainer.unknown[DROPPED]


@pytest.mark.parametrize(
    "config",
    [
        "on = True\non = False\ndef f():\n    return on\nargs = DPOConfig(precompute_ref_log_probs=f())",
        "args = DPOConfig()\nif x:\n    args.precompute_ref_log_probs = True",
        "args = DPOConfig(precompute_ref_log_probs=True)\nif x:\n    args = DPOConfig()",
        "for on in (True, False):\n    pass\nargs = DPOConfig(precompute_ref_log_probs=on)",
        "args = DPOConfig(precompute_ref_log_probs=a if b else c)",
        "with open('x') as on:\n    pass\nargs = DPOConfig(precompute_ref_log_probs=on)",
        "def f(on):\n    global args\n    args = DPOConfig(precompute_ref_log_probs=on)",
        "args = None if x else DPOConfig()",
    ],
)
def test_an_argument_that_the_text_leaves_open_is_unknown(scan: Any, config: str) -> None:
    (trainer,) = scan(f"from trl import DPOConfig, DPOTrainer\n{config}\nDPOTrainer('gpt2', args=args)\n")
    assert trainer.hit_ids == set()
    assert DROPPED in trainer.unknown
