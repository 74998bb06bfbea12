"""GRPO iterations of TRL on a transformers model: a process and an environment of its own.

`python -m bench.iteration --against=trl` starts this file with another interpreter; it imports
json_worker.py beside it and nothing else of ours. After "load", as described there:

    {"command": "run"} -> {"seconds", "cpu_seconds", "tokens"}, one iteration: drawing, rewards, and one update

Every response has exactly `response_tokens` tokens, and rewards are given by prompt and draw: so the work is the same
as in our iteration.
"""

import itertools
import queue
import tempfile
import threading
import time
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from json_worker import serve
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback


class Baseline(TrainerCallback):
    """A trainer that takes one step for each request."""

    def __init__(
        self,
        model: str,
        prompts: list[str],
        rewards: list[list[float]],
        prompts_per_iteration: int,
        response_tokens: int,
        micro_batches: int,
    ):
        self.wanted, self.done = threading.Semaphore(0), queue.Queue()
        self.tokens = 0
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{model}/tokenizer.json")
        tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
        weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        weights.generation_config.eos_token_id = None
        group_size = len(rewards[0])
        rows = prompts_per_iteration * group_size
        self.folder = tempfile.TemporaryDirectory()
        config = trl.GRPOConfig(
            output_dir=self.folder.name, max_steps=len(prompts) // prompts_per_iteration, num_generations=group_size,
            per_device_train_batch_size=rows // micro_batches, gradient_accumulation_steps=micro_batches,
            max_completion_length=response_tokens, generation_kwargs={"min_new_tokens": response_tokens},
            shuffle_dataset=False, learning_rate=1e-5, beta=0.0, bf16=False, gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(), report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip

        def reward(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
            self.tokens = sum(map(len, completion_ids))
            draws = [len(list(same)) for _, same in itertools.groupby(number)]
            assert draws == [group_size] * prompts_per_iteration, draws
            return [rewards[prompt][row % group_size] for row, prompt in enumerate(number)]

        data = Dataset.from_dict({"prompt": prompts, "number": list(range(len(prompts)))})
        self.trainer = trl.GRPOTrainer(
            model=weights, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer,
            callbacks=[self],
        )  # fmt: skip
        threading.Thread(target=self._train, daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """Returns versions and the machine."""
        return {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "threads": torch.get_num_threads(),
        }

    def _train(self) -> None:
        try:
            self.trainer.train()
        except BaseException as error:
            self.done.put(error)
            raise

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Waits for a request."""
        self.wanted.acquire()
        self.begun = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Answers the request."""
        seconds, cpu_seconds = time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]
        self.done.put({"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": self.tokens})

    def run(self) -> dict[str, float]:
        """Runs one iteration; returns its time, and the tokens of its responses."""
        self.wanted.release()
        done = self.done.get()
        if isinstance(done, BaseException):
            raise SystemExit(f"the trainer ended: {done!r}")
        return done


if __name__ == "__main__":
    serve(Baseline)
