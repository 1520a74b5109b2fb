"""The peer of the CPU benchmarks: Hugging Face transformers' `generate`, with its defaults and a KV cache."""

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

Prompts = list[list[int]]


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that never stops, but records the time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class TransformersPeer:
    """A loaded transformers model that samples greedily and ignores EOS."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        """Load a model in Hugging Face layout; `dtype` is float32 or bfloat16, `threads` are PyTorch's."""
        self._threads = threads
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def weight_bytes(self) -> int:
        """Return the weight bytes that a decode step reads.

        These are all weights except an embedding that is not tied to the output layer.
        """
        embedding = self._model.get_input_embeddings().weight
        total = sum(weight.nbytes for weight in self._model.parameters())
        tied = embedding.data_ptr() == self._model.get_output_embeddings().weight.data_ptr()
        return int(total if tied else total - embedding.nbytes)

    def prefill(self, prompt: list[int]) -> float:
        """Return the seconds from a prompt to its first token."""
        started = time.perf_counter()
        self._generate([prompt], 1)
        return time.perf_counter() - started

    def decode(self, prompts: Prompts, new_tokens: int) -> tuple[float, Prompts]:
        """Return the seconds per decode step of prompts of equal length, and the tokens. The first step is excluded."""
        clock = _Clock()
        answers = self._generate(prompts, new_tokens, clock)
        return (clock.times[-1] - clock.times[0]) / (new_tokens - 1), answers

    @torch.inference_mode()
    def _generate(self, prompts: Prompts, new_tokens: int, *criteria: StoppingCriteria) -> Prompts:
        torch.set_num_threads(self._threads)
        ids = torch.tensor(prompts)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=list(criteria),
        )
        answers: Prompts = output[:, ids.shape[1] :].tolist()
        return answers
