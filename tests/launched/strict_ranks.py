"""Train a tiny DPO run of experts, which hits a bug under DDP, on all ranks, of which one may have no repair.

    python strict_ranks.py FOLDER CASE RANK

``CASE`` is what the rank ``RANK`` does. The ranks are started one by one, without a launcher that would end the others.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import traceback
from typing import Any

FOLDER, CASE, IT = sys.argv[1], sys.argv[2], os.environ["RANK"] == sys.argv[3]
BUG = "moe-aux-loss-lost-under-deepspeed"
ENVIRONMENT = {
    "skips it": {"TRL_HOTFIX_SKIP": BUG},
    "is off": {"TRL_HOTFIX": "0"},
    "skips another": {"TRL_HOTFIX_SKIP": "gkd-grad-accum-scaling"},
}
ENVIRONMENT |= {"only one is strict": {"TRL_HOTFIX": "strict"}}

if IT and CASE in ENVIRONMENT and "AGAIN" not in os.environ:
    # The hook has run at the start of this interpreter, so the rank starts again with its own environment.
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "AGAIN": "1", **ENVIRONMENT[CASE]})


def main() -> None:
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    import tiny

    # Where the model is wrapped, TRL's own code fails with the auxiliary loss. A rank without the repair leaves it out.
    class Overrides(DPOTrainer):  # type: ignore[misc]
        def get_batch_loss_metrics(self, *args: Any, **kwargs: Any) -> Any:
            self.aux_loss_enabled = False
            return inspect.unwrap(DPOTrainer.get_batch_loss_metrics)(self, *args, **kwargs)

    class Dies(TrainerCallback):  # type: ignore[misc]
        def __init__(self, event: str) -> None:
            setattr(self, event, lambda *args, **kwargs: os._exit(7))

    class Fails(TrainerCallback):  # type: ignore[misc]
        """The wrapper fails in this step."""

        def __init__(self, step: int) -> None:
            self.step = step

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            from trl_hotfix.call import Wrapped
            from trl_hotfix.patching import engine

            if state.global_step == self.step:
                module_patch = next(one for one in engine.ENGINE.module_patches() if one.patch.id == BUG)
                assert module_patch.breaker.opens(LookupError("not here"), Wrapped(len, None, ()))
                trainer.aux_loss_enabled = False

    # A folder for each rank: no rank reads a model while another still writes it.
    with tempfile.TemporaryDirectory() as models:
        policy, reference = (tiny.mixtral(models, seed=seed, coefficient=0.5) for seed in (0, 1))
    settings: dict[str, Any] = {"max_length": 16, "max_prompt_length": 8, "max_steps": 6, "output_dir": f"{FOLDER}/out"}
    trainer = tiny.trainer(
        Overrides if IT and CASE == "overrides it" else DPOTrainer,
        model=policy,
        ref_model=reference,
        args=tiny.config(DPOConfig, **settings),
        train_dataset=tiny.preferences(),
        tokenizer=tiny.tokenizer(),
    )
    callbacks = trainer.callback_handler.callbacks
    if IT and CASE == "dies at the beginning":
        callbacks.insert(0, Dies("on_train_begin"))
    if IT and CASE == "dies in a step":
        callbacks.insert(0, Dies("on_step_end"))
    if IT and CASE in ("fails in a step", "two fail"):
        callbacks.insert(0, Fails(2))
    if not IT and CASE == "two fail":
        callbacks.insert(0, Fails(3))
    if IT and CASE == "trained before":
        # Before there is a process group, a rank may train alone.
        from trl_hotfix.recording import ranks

        both, ranks.rank_and_world = ranks.rank_and_world, lambda: (0, 1)
        ranks.number_of_training()
        ranks.rank_and_world = both
    try:
        trainer.train()
    finally:
        print(f"steps: {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    else:
        code = 0
    # A thread of Gloo that still holds a tensor sometimes aborts a rank whose Python ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
