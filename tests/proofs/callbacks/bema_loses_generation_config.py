"""Train two steps with the real SFTTrainer, a BEMACallback, and a model that has a generation config of its own.

The folder ``bema`` is compared with the model that the trainer saves, and the averages with the formula of the paper
(arXiv:2508.00180) on the weights after each step.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "BEMACallback makes a second model of the class and the config, which no PeftModel can be made of"}

ENDS = [1, 5]


def train() -> tiny.TrainingResult:
    from transformers import GenerationConfig

    return _train(lambda config: GenerationConfig(eos_token_id=ENDS, pad_token_id=0, do_sample=True, temperature=0.7))


def unaffected() -> tiny.TrainingResult:
    """Train a model whose generation config is that of its config."""
    from transformers import GenerationConfig

    return _train(GenerationConfig.from_model_config)


def _train(generation_config: Any) -> tiny.TrainingResult:
    import trl
    from datasets import Dataset
    from safetensors.torch import load_file
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    if not hasattr(trl, "BEMACallback"):
        return tiny.TrainingResult(absent("this release has no BEMACallback"))
    trained: list[dict[str, Any]] = []

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.generation_config = generation_config(model.config)
            self.on_step_end(args, state, control, model)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            trained.append({name: weight.detach().clone() for name, weight in model.named_parameters()})

    rows = [{"text": " ".join(f"w{index + step}" for step in range(3 + index % 4))} for index in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"max_length": 16, "max_steps": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
        trainer = tiny.trainer(
            tiny.measured(SFTTrainer),
            model=tiny.llama(folder, seed=0),
            args=tiny.config(SFTConfig, output_dir=folder, **sizes),
            train_dataset=Dataset.from_list(rows),
            tokenizer=tiny.tokenizer(),
            callbacks=[Recorder(), trl.BEMACallback(update_freq=1)],
        )
        trainer.train()
        trainer.save_model(f"{folder}/trained")
        averaged = load_file(f"{folder}/bema/model.safetensors")
        saved, right = (_generation_config(f"{folder}/{name}") for name in ("bema", "trained"))
    for name, expected in _expected(trained).items():
        assert float((averaged[name] - expected).abs().max()) < 1e-6, name
    if right["eos_token_id"] != ENDS:
        # The two may differ in use_cache, which a trainer sets on the config after the model was made.
        assert saved["eos_token_id"] == right["eos_token_id"]
        outcome: Outcome = absent("the generation config is that of the config")
    else:
        count = len(saved["eos_token_id"]) if isinstance(saved["eos_token_id"], list) else 1
        outcome = judge(count, right=len(ENDS), wrong=1)
        assert (saved == right) is (outcome.verdict is Verdict.FIXED), saved
        assert ("temperature" in saved) is (outcome.verdict is Verdict.FIXED), saved
    averages = {f"averaged {name}": weight for name, weight in averaged.items()}
    return tiny.TrainingResult(outcome, sum(trainer.losses), {**trainer.step.gradients, **averages})


def _generation_config(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "generation_config.json").read_text())
    return found


def _expected(trained: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the averaged weights after the last step, by the formula."""
    initial, *trajectory = trained
    average, averaged = dict(initial), dict(initial)
    for step, current in enumerate(trajectory, 1):
        beta, alpha = (10 + step) ** -0.5, (10 + step) ** -0.2
        for name, weight in current.items():
            average[name] = (1 - beta) * average[name] + beta * weight
            averaged[name] = average[name] + alpha * (weight - initial[name])
    return averaged
