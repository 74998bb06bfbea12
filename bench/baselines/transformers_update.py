"""The policy update in PyTorch on a transformers model: a process and an environment of its own.

`python -m bench.update --against=transformers` starts this file with another interpreter; it
imports json_worker.py beside it and nothing else of ours. After "load", as described there:

    {"command": "score", "examples": [...]}  -> {"logprobs"}, of each response's tokens
    {"command": "begin", "examples": [...]}  -> {}: the minibatch that every update takes
    {"command": "run"}                       -> {"seconds", "loss", "grad_norm", ...}, one update

An update is that of a usual trainer: layers recomputed in the backward pass (settings["recompute"]), the logits of the
response tokens alone, clipped policy loss, clipped gradient, AdamW. Weights are float32; with bfloat16, products are
autocast.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from json_worker import reset_peak, resident_bytes, serve
from torch.nn import functional
from transformers import AutoModelForCausalLM


class Baseline:
    """A model, its optimiser and the minibatch."""

    def __init__(self, model: str, dtype: str, micro_batches: int, learning: dict[str, Any], settings: dict[str, Any]):
        self.micro_batches, self.learning = micro_batches, learning
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.autocast = None if dtype == "float32" else getattr(torch, dtype)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=settings["attention"]
        )
        self.model.to(self.device).train()
        if settings["recompute"]:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        weights = list(self.model.parameters())
        self.weight_bytes = sum(weight.nbytes for weight in weights)
        sum(float(weight.detach().sum()) for weight in weights)  # read, so that all of them are in memory
        self.before = resident_bytes("VmRSS")
        self.optimizer = torch.optim.AdamW(
            weights, lr=learning["learning_rate"], betas=(learning["b1"], learning["b2"]), eps=learning["epsilon"],
            weight_decay=learning["weight_decay"], **{settings["optimizer"]: True},
        )  # fmt: skip
        self.batch: dict[str, torch.Tensor] = {}
        self.first = True

    def describe(self) -> dict[str, Any]:
        """Returns versions and the machine."""
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "attention": self.model.config._attn_implementation,
            "weight_bytes": self.weight_bytes,
        }

    def _tensors(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Returns rows of prompt and response, padded on the right, and the data of the response tokens."""
        longest = max(len(example["response"]) for example in examples)
        width = max(len(example["prompt"]) + len(example["response"]) for example in examples)
        size = len(examples)
        batch = {
            "tokens": torch.zeros(size, width, dtype=torch.long),
            "targets": torch.zeros(size, longest, dtype=torch.long),
            "at": torch.zeros(size, longest, dtype=torch.long),  # where the token is predicted
            "mask": torch.zeros(size, longest),
            "old": torch.zeros(size, longest),
            "advantage": torch.zeros(size, 1),
        }
        for row, example in enumerate(examples):
            prompt, response = (torch.tensor(example[key]) for key in ("prompt", "response"))
            length = len(response)
            batch["tokens"][row, : len(prompt) + length] = torch.cat([prompt, response])
            batch["targets"][row, :length] = response
            batch["at"][row, :length] = torch.arange(length) + len(prompt) - 1
            batch["mask"][row, :length] = 1
            if "old_logprobs" in example:
                batch["old"][row, :length] = torch.tensor(example["old_logprobs"])
                batch["advantage"][row] = example["advantage"]
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _logprobs(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns log-probabilities of the response tokens, [B, R]; only their positions go through the output head."""
        cast = contextlib.nullcontext()
        if self.autocast is not None:
            cast = torch.autocast(self.device, dtype=self.autocast)
        with cast:
            # Without a mask attention is causal, and padding is at the end.
            hidden = self.model.model(input_ids=micro["tokens"], use_cache=False).last_hidden_state
            at = micro["at"][..., None].expand(-1, -1, hidden.shape[-1])
            logits = self.model.lm_head(hidden.gather(1, at))
        # Scores are compared, so they are in float64: with a vocabulary of 150,000, torch's sums in float32 have larger
        # errors than the model's products.
        logits = logits.flatten(0, 1).to(torch.float32 if torch.is_grad_enabled() else torch.float64)
        return -functional.cross_entropy(logits, micro["targets"].flatten(), reduction="none").view_as(micro["at"])

    def _micro_batches(self, batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        pieces = {name: tensor.chunk(self.micro_batches) for name, tensor in batch.items()}
        for index in range(len(pieces["tokens"])):
            yield {name: piece[index] for name, piece in pieces.items()}

    @torch.no_grad()
    def score(self, examples: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
        """Returns log-probabilities of each response's tokens."""
        rows = torch.cat([self._logprobs(micro) for micro in self._micro_batches(self._tensors(examples))])
        logprobs = [row[: len(example["response"])].tolist() for row, example in zip(rows, examples, strict=True)]
        return {"logprobs": logprobs}

    def begin(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Sets the minibatch of all updates."""
        self.batch = self._tensors(examples)
        return {}

    def _update(self) -> tuple[float, float]:
        """Makes one optimiser step; returns its loss and the norm of the gradient."""
        settings, total = self.learning, 0.0
        self.optimizer.zero_grad(set_to_none=True)
        num_tokens = self.batch["mask"].sum()
        for micro in self._micro_batches(self.batch):
            ratio = torch.exp(self._logprobs(micro) - micro["old"])
            advantage = micro["advantage"]
            clipped = ratio.clamp(1 - settings["clip_low"], 1 + settings["clip_high"])
            terms = torch.maximum(-ratio * advantage, -clipped * advantage)
            # Dual clip: if the advantage A is negative, a term is at most dual_clip * |A|.
            bounded = torch.minimum(terms, -settings["dual_clip"] * advantage)
            terms = torch.where(advantage < 0, bounded, terms)
            loss = (terms * micro["mask"]).sum() / num_tokens
            loss.backward()
            total += float(loss.detach())
        exact = self._gradient_norm() if self.first else None
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings["clip_norm"])
        self.optimizer.step()
        self.first = False
        return total, float(norm) if exact is None else exact

    def _gradient_norm(self) -> float:
        """Sums squares in float64: `clip_grad_norm_` sums them in float32, with errors of up to 1e-4 of the norm.

        This costs time, so it is done for the first update alone, which is not timed.
        """
        return math.sqrt(sum(float(weight.grad.double().square().sum()) for weight in self.model.parameters()))

    def run(self) -> dict[str, float]:
        """Runs one update; returns its time, its results, and the memory beyond the weights."""
        cuda = self.device == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            reset_peak()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        loss, norm = self._update()
        if cuda:
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        extra = torch.cuda.max_memory_allocated() - self.weight_bytes if cuda else resident_bytes("VmHWM") - self.before
        return dict(seconds=seconds, cpu_seconds=cpu_seconds, loss=loss, grad_norm=norm, extra_bytes=extra)


if __name__ == "__main__":
    serve(Baseline)
