"""transformers' continuous batching on a rollout workload: a process and an environment of its own.

`python -m bench.rollout --against=transformers` starts this file with another interpreter; it
imports json_worker.py beside it and nothing else of ours. After "load", as described there:

    {"command": "run"}                                -> {"seconds", "tokens"}, the whole workload once
    {"command": "score", "rows": [[ids]]}             -> {"logprobs"}, of each token after the first given those before

The manager stays alive between runs, as it would in a trainer; while there is no request its thread sleeps.
"""

import time
from typing import Any

import torch
import transformers
from json_worker import serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


class Baseline:
    """A loaded model with its running continuous-batching manager, and the workload."""

    def __init__(
        self,
        model: str,
        prompts: list[list[int]],
        lengths: list[list[int]],
        temperature: float,
        settings: dict[str, Any],
    ):
        settings = dict(settings)
        attention = settings.pop("attention")
        dtype = getattr(torch, settings.pop("dtype"))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=attention)
        self.model.to(self.device).eval()
        # By prompt, as a trainer sends them. Each draw is a request, since the draws of a prompt have their own
        # lengths; whole prompt pages are shared through the prefix cache.
        self.requests = [(prompt, length) for prompt, row in zip(prompts, lengths, strict=True) for length in row]
        # Explicit, so that no processor but the temperature is applied; at 1.0 there is none at all.
        generation = GenerationConfig(
            do_sample=True, temperature=temperature, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
        )
        self.manager = self.model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**settings)
        )
        self.manager.warmup()
        self.manager.start()

    def describe(self) -> dict[str, Any]:
        """Returns versions and the settings that the manager resolved."""
        resolved = self.manager.continuous_batching_config
        names = ("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "allow_block_sharing")
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": self.device,
            "threads": torch.get_num_threads(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
        } | {name: getattr(resolved, name) for name in names}

    def run(self) -> dict[str, float]:
        """Draws the whole workload once; fails if a response hasn't exactly the prescribed length."""
        begin = time.perf_counter()
        wanted = {
            self.manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1): length
            for prompt, length in self.requests
        }
        tokens = 0
        while wanted:
            result = self.manager.get_result(timeout=1)
            if result is None:
                if not self.manager.is_running():
                    raise RuntimeError("the generation thread died; see the log above.")
                continue
            length = wanted.pop(result.request_id)
            if result.error is not None or len(result.generated_tokens) != length:
                raise RuntimeError(f"{len(result.generated_tokens)} tokens in place of {length}: {result.error}")
            tokens += length
        return {"seconds": time.perf_counter() - begin, "tokens": tokens}

    @torch.no_grad()
    def score(self, rows: list[list[int]]) -> dict[str, list[list[float]]]:
        """Returns the log-probability of each token after the first, a row at a time, from logits in float32.

        Sums are in float64: with a vocabulary of 150,000, torch's sums in float32 have larger errors than the model's
        products.
        """
        result = []
        with self.manager.pause():
            for row in rows:
                ids = torch.tensor([row], device=self.device)
                logprobs = self.model(ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
                result.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())
        return {"logprobs": result}

    def stop(self) -> None:
        """Ends the manager's thread."""
        self.manager.stop(block=True)
        self.manager.destroy()


if __name__ == "__main__":
    WORKER = serve(Baseline)
    if WORKER is not None:
        WORKER.stop()
