"""llama.cpp on a rollout workload, from a GGUF file: a process and an environment of its own, with `xllamacpp`.

`python -m bench.rollout --against=llama.cpp` starts this file with another interpreter; it imports json_worker.py
beside it and nothing else of ours. After "load", as described there:

    {"command": "run"}                                -> {"seconds", "tokens"}, the whole workload once

Weights keep the precision of the file, and products are those of its quantised blocks.
"""

import concurrent.futures
import os
import time
from typing import Any

import xllamacpp
from json_worker import serve


class Baseline:
    """A server inside this process, with one slot for each response in flight, and the workload."""

    def __init__(
        self,
        model: str,
        prompts: list[list[int]],
        lengths: list[list[int]],
        temperature: float,
        settings: dict[str, Any],
    ):
        self.settings, self.temperature = settings, temperature
        self.requests = [(prompt, length) for prompt, row in zip(prompts, lengths, strict=True) for length in row]
        slots, threads = settings["slots"], os.cpu_count() or 1
        params = xllamacpp.CommonParams()
        params.model.path, params.n_parallel, params.cont_batching = model, slots, True
        longest = max(len(prompt) + length for prompt, length in self.requests)
        params.n_ctx = slots * -(-longest // 256) * 256  # llama.cpp rounds a slot's context up to 256
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)
        self.threads = threads

    def describe(self) -> dict[str, Any]:
        """Returns its version and its number of threads."""
        return {"xllamacpp": xllamacpp.__version__, "threads": self.threads}

    def _complete(self, request: tuple[list[int], int]) -> int:
        prompt, length = request
        answer = self.server.handle_completions({
            "prompt": prompt, "max_tokens": length, "ignore_eos": True, "temperature": self.temperature,
            "top_k": 0, "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"], "cache_prompt": True,
        })  # fmt: skip
        tokens = answer["usage"]["completion_tokens"]
        if tokens != length:
            raise RuntimeError(f"{tokens} tokens in place of {length}.")
        return tokens

    def run(self) -> dict[str, float]:
        """Draws the whole workload once; fails if a response hasn't exactly the prescribed length."""
        begin = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(self.settings["slots"]) as pool:
            tokens = sum(pool.map(self._complete, self.requests))
        return {"seconds": time.perf_counter() - begin, "tokens": tokens}


if __name__ == "__main__":
    serve(Baseline)
