"""Stand-ins for what a CPU lacks: a vLLM server, continuous batching, and the kernels of Liger."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from .materials import AnswersFromTable
from .setting import CannotBeAskedError

LIGER = ("use_liger_kernel", "use_liger_loss")
KERNELS = "liger_kernel.transformers"


class Server:
    """Stands in place of TRL's client of a vLLM server. It answers from the table.

    It computes the log-probs of its answers with its own copy of the model, to which TRL must send the weights.
    """

    def __init__(self, client: Any, answers: AnswersFromTable, tokenizer: Any) -> None:
        policy = answers.policy
        model = type(policy).from_pretrained(policy.name_or_path)
        self._model, self._answers, self._tokenizer = model, answers, tokenizer
        # What a release expects of an answer.
        source = inspect.getsource(client.generate)
        self._has_log_probs, self._has_candidates = '"logprobs"' in source, "logprob_token_ids" in source

    def init_communicator(self, *args: Any, **kwargs: Any) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def close_communicator(self) -> None: ...

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_param(self, name: str, weights: Any) -> None:
        self.update_named_params((), [(name, weights)])

    def update_named_params(self, metadata: Any, named: Iterable[tuple[str, Any]]) -> None:
        own = dict(self._model.named_parameters())
        for name, weights in named:
            own[name].data.copy_(weights)

    def generate(self, prompts: list[Any], n: int = 1, **kwargs: Any) -> Any:
        asked = [self._tokenizer(one)["input_ids"] if isinstance(one, str) else list(one) for one in prompts]
        both = [(prompt, self._answers.answer(prompt, n)) for prompt in asked for _ in range(n)]
        answers = [answer for _, answer in both]
        if not self._has_log_probs:
            return answers
        log_probs: list[Any] = [self._log_probs(*each) for each in both]
        found = {"prompt_ids": asked, "completion_ids": answers, "logprobs": log_probs}
        if self._has_candidates:
            found["logprobs"] = [[[one] for one in each] for each in log_probs]
            found["logprob_token_ids"] = [[[one] for one in each] for each in answers]
        return found

    def _log_probs(self, prompt: list[int], answer: list[int]) -> list[float]:
        import torch

        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        found: list[float] = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None]).squeeze(-1).tolist()
        return found


@contextmanager
def server(args: Any, answers: AnswersFromTable, tokenizer: Any) -> Iterator[None]:
    """Have TRL find a vLLM server inside the block, if its config asks for vLLM.

    Raises ``CannotBeAskedError`` where this TRL has no client of a server.
    """
    if not getattr(args, "use_vllm", False):
        yield
        return
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "trl"]
    clients = [module for module in modules if "VLLMClient" in vars(module)]
    if not clients:
        raise CannotBeAskedError("this TRL has no client of a vLLM server")
    if hasattr(args, "vllm_mode"):
        args.vllm_mode = "server"
    import torch

    client = clients[0].VLLMClient
    found = {
        "VLLMClient": lambda *_, **__: Server(client, answers, tokenizer),
        "is_vllm_available": lambda *_, **__: True,
    }
    with ExitStack() as stack:
        for module in modules:
            for name in found.keys() & vars(module).keys():
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, found[name])
        # Up to 0.24 TRL tells the client which GPU it has.
        stack.callback(setattr, torch.cuda, "current_device", torch.cuda.current_device)
        torch.cuda.current_device = lambda: 0
        yield


class Batches:
    """Stands on a model in place of ``generate_batch``, which needs a GPU, and answers from the table."""

    def __init__(self, answers: AnswersFromTable) -> None:
        self._answers = answers

    def __call__(self, inputs: Iterable[Iterable[int]], **kwargs: Any) -> dict[int, Any]:
        answers = [self._answers.answer(list(prompt), 1) for prompt in inputs]
        return {number: SimpleNamespace(generated_tokens=answer) for number, answer in enumerate(answers)}


@contextmanager
def liger(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Have Liger compute losses alone inside the block, if these fields of a config ask for it.

    Its losses are torch's own operations, here without a compiler. Its kernels need a GPU. Raises
    ``CannotBeAskedError`` where it is not installed.
    """
    if not any(arguments.get(name) for name in LIGER):
        yield
        return
    if find_spec("liger_kernel") is None:
        raise CannotBeAskedError("liger-kernel is not installed")
    import torch

    before = sys.modules.get(KERNELS)
    sys.modules[KERNELS] = no_kernels()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if before is None:
            del sys.modules[KERNELS]
        else:
            sys.modules[KERNELS] = before


def no_kernels() -> types.ModuleType:
    """Return a module in place of Liger's that puts nothing into a model."""
    import transformers

    kernels: Any = types.ModuleType(KERNELS)
    kernels._apply_liger_kernel_to_instance = lambda *_, **__: None
    kernels.AutoLigerKernelForCausalLM = transformers.AutoModelForCausalLM
    return kernels  # type: ignore[no-any-return]
