"""The tinker client on a rollout workload: a process that samples from a server, as many requests at a time as asked.

`python -m bench.serve` starts this file; it imports json_worker.py beside it and nothing else of
ours. After "load", as described there:

    {"command": "run", "adapter": bool}       -> {"lengths", "cpu_seconds"}, the whole workload once
"""

import logging
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"
warnings.simplefilter("ignore")
logging.getLogger("tinker").setLevel(logging.ERROR)  # a line for each poll that was too early

import tinker  # noqa: E402
from json_worker import serve  # noqa: E402
from tinker import types  # noqa: E402


class Client:
    """Two sampling clients, of the base and of an adapter that was not trained."""

    def __init__(
        self, address: str, model: str, rank: int, prompts: list[list[int]], lengths: list[list[int]], at_once: int
    ):
        self.requests = [(prompt, length) for prompt, row in zip(prompts, lengths, strict=True) for length in row]
        self.at_once = at_once
        self.service = tinker.ServiceClient(base_url=address, api_key="tml-benchmark")
        training = self.service.create_lora_training_client(model, rank=rank)
        self.clients = {
            False: self.service.create_sampling_client(base_model=model),
            True: training.save_weights_and_get_sampling_client(),
        }

    def describe(self) -> dict[str, Any]:
        """Returns the client's version."""
        return {"tinker": tinker.__version__}

    def run(self, adapter: bool) -> dict[str, Any]:
        """Returns the lengths of the responses, and the processor time of this process."""
        client, begin = self.clients[adapter], time.process_time()

        def one(request: tuple[list[int], int]) -> int:
            prompt, length = request
            sampling = types.SamplingParams(max_tokens=length, stop=[])
            found = client.sample(types.ModelInput.from_ints(prompt), 1, sampling).result()
            return len(found.sequences[0].tokens)

        with ThreadPoolExecutor(self.at_once) as threads:
            lengths = list(threads.map(one, self.requests))
        return {"lengths": lengths, "cpu_seconds": time.process_time() - begin}


if __name__ == "__main__":
    serve(Client)
