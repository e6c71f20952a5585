"""What a config is made of, again: what the user gave, what he assigned later, and what a run changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs_trl

SCRIPT = """
import copy
from trl_hotfix.checking.argument_classes import ArgumentClasses, given_to, made_again
from trl_hotfix.checking.one_run import arguments_of
from trl_hotfix.checking.variant import Variant

run = [Variant()]
classes = ArgumentClasses(lambda given, fields: arguments_of(run[0], given, fields, "safe"))
classes.install()
from transformers import TrainingArguments
from trl import SFTConfig

class Own(SFTConfig):
    def __init__(self, folder, **kwargs):
        super().__init__(folder, learning_rate=7.0, **kwargs)

for cls in (TrainingArguments, SFTConfig, Own):
    args = cls("elsewhere", per_device_train_batch_size=64, gradient_accumulation_steps=4, max_steps=9000)
    args.seed = 7
    assert (args.output_dir, args.max_steps, args.learning_rate) == ("safe", 2, 0.05), args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 2)
    assert given_to(args)["max_steps"] == 9000
    for each in (args, copy.copy(args), copy.deepcopy(args)):
        run[0] = Variant(batch_size=2, accumulation=4, evaluates=True)
        again = made_again(each)
        assert (again.per_device_train_batch_size, again.gradient_accumulation_steps, again.seed) == (2, 4, 7)
        assert again.eval_steps == 1
        run[0] = Variant()
try:
    SFTConfig(no_such_field=1)
except TypeError as error:
    assert "no_such_field" in str(error)
else:
    raise AssertionError("no error")
"""


def test_configs() -> None:
    # It changes transformers, so it has a process of its own.
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
