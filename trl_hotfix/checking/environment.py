"""What a check keeps a script from doing: using a GPU, the hub or a tracker, and writing outside its folder."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from ..settings import without_our_variables

VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "DISABLED",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    "TQDM_DISABLE": "1",
    # TRL as it is, also where the script calls `apply()`. A run that asks for repairs takes this away.
    "TRL_HOTFIX": "0",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def of_process(offline: bool) -> dict[str, str]:
    """Return the variables of the process of a check: those of this one, without what chooses repairs there."""
    return {**without_our_variables(), **VARIABLES, **(OFFLINE if offline else {})}


def mirror(source: Path, target: Path) -> None:
    """Link a folder's files into another, so that relative paths work there and new files stay in it."""
    for entry in source.iterdir():
        if not (target / entry.name).exists():
            (target / entry.name).symlink_to(entry)


class Redirect:
    """Puts what a script saves by an absolute path into the folder of the check."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, path: Any) -> Any:
        if not isinstance(path, (str, os.PathLike)):
            return path
        whole = Path(path).absolute()
        if whole.is_relative_to(self._folder) and whole.resolve().is_relative_to(self._folder):
            return path
        return str(self._folder / "saved" / whole.relative_to(whole.anchor))

    def read(self, path: Any) -> Any:
        """Return where the script has saved this before, or the path itself."""
        moved = self.path(path) if isinstance(path, (str, os.PathLike)) and Path(path).is_absolute() else path
        return moved if isinstance(moved, str) and Path(moved).exists() else path

    def install(self) -> None:
        import transformers
        from transformers import tokenization_utils_base

        for owner, name in (
            (transformers.PreTrainedModel, "save_pretrained"),
            (transformers.PretrainedConfig, "save_pretrained"),
            (transformers.GenerationConfig, "save_pretrained"),
            (tokenization_utils_base.PreTrainedTokenizerBase, "save_pretrained"),
            (transformers.ProcessorMixin, "save_pretrained"),
        ):
            self._wrap(owner, name)

    def _wrap(self, owner: Any, name: str) -> None:
        original = vars(owner).get(name)
        if original is None:
            return

        @functools.wraps(original)
        def save(thing: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("push_to_hub", None)
            return original(thing, self.path(path), *args, **kwargs)

        setattr(owner, name, save)


def without_gpu() -> None:
    """Have ``.cuda()`` and ``.to("cuda")`` of a model or a tensor leave it on the CPU."""
    import torch

    torch.set_num_threads(1)
    torch.set_num_threads = lambda number: None
    cuda: Any = torch.cuda
    # A script asks these to choose a device or a dtype, and they raise where there is no GPU.
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.get_device_capability = lambda device=None: (8, 0)
    for owner in (torch.nn.Module, torch.Tensor):
        owner.cuda = lambda thing, *args, **kwargs: thing
        owner.to = _on_cpu(owner.to)


def _on_cpu(original: Any) -> Any:
    @functools.wraps(original)
    def to(thing: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_gpu(args[0]):
            args = args[1:]
        if _is_gpu(kwargs.get("device")):
            kwargs.pop("device")
        return original(thing, *args, **kwargs) if args or kwargs else thing

    return to


def _is_gpu(device: Any) -> bool:
    return (isinstance(device, int) and not isinstance(device, bool)) or str(device).partition(":")[0] in (
        "cuda",
        "xpu",
    )


def without_pushing() -> None:
    """Have nothing go to the hub, and nobody log in to it."""
    import huggingface_hub
    import transformers
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    for name in ("login", "notebook_login", "interpreter_login"):
        setattr(huggingface_hub, name, lambda *args, **kwargs: None)
    owners = (transformers.PreTrainedModel, transformers.Trainer, transformers.PretrainedConfig)
    for owner in (*owners, PreTrainedTokenizerBase):
        if hasattr(owner, "push_to_hub"):
            owner.push_to_hub = lambda *args, **kwargs: None
