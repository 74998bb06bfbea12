"""Serves a Hugging Face folder over JetStream's gRPC protocol, from the engine that training samples with.

python -m reinforce_ada_jax.serve --model=HF_DIR
python -m reinforce_ada_jax.serve --model=package:cipher --dtype=float32 --greedy

The first SIGINT (Ctrl-C) or SIGTERM stops it when the running responses have ended, or --grace_s seconds have; a second
one stops it at once. Nothing that a client sends makes it read or write a file.
"""

import asyncio
import dataclasses
import math
import os
import signal
import socket
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.config import Config, DataConfig, ModelConfig, SamplingConfig, values
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.engine import Engine, buckets
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.serving import jetstream
from reinforce_ada_jax.training import components as components_lib

LOOPBACK = ("localhost", "127.", "::1")
STATUS_EVERY_S = 10.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the flags say; each has the name of its flag."""

    model: str
    host: str = "127.0.0.1"
    port: int = 9000
    slots: int = 16
    waiting: int = 256
    max_prompt_tokens: int = 1024
    max_response_tokens: int = 1024
    page_size: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    dtype: str = "bfloat16"
    seed: int = 0
    grace_s: float = 10.0

    def check(self) -> None:
        """Raises ValueError with the rule, the value and the remedy."""
        ranges = {
            "port": (0, 65_535),
            "slots": (1, math.inf),
            "waiting": (0, math.inf),
            "max_prompt_tokens": (1, 32_768),  # JetStream's longest bucket
            "max_response_tokens": (1, math.inf),
            "page_size": (1, math.inf),
            "temperature": (0, math.inf),
            "top_k": (0, math.inf),
            "top_p": (0, 1),
            "seed": (-(2**31), 2**31 - 1),
            "grace_s": (0, math.inf),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not least <= value <= most:
                bound = f"at least {least}" if most == math.inf else f"{least} to {most:,}"
                raise ValueError(f"--{name} is {value}; it must be {bound}.")
        if self.dtype not in values.DTYPES:
            raise ValueError(f"--dtype is {self.dtype!r}; it must be one of {', '.join(values.DTYPES)}.")
        if self.greedy and self.temperature not in (0, 1):
            raise ValueError(
                f"--greedy takes the best token, --temperature={self.temperature} draws: drop one of them."
            )

    @property
    def sampling(self) -> SamplingParams:
        """How every response is drawn."""
        temperature = 0.0 if self.greedy else self.temperature
        return SamplingParams(self.max_response_tokens, temperature, self.top_k, self.top_p)

    @property
    def address(self) -> str:
        """Of the host, as gRPC writes it: an IPv6 address is in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host


def check_address(host: str, port: int) -> None:
    """Raises ValueError where nothing can listen: gRPC would say so in ten lines, and after the weights are read."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise ValueError(f"cannot listen on {host}, port {port} ({error.strerror}): choose another.") from error


def make_engine(settings: Settings) -> tuple[components_lib.Components, Engine]:
    """The parts of the model folder, and the engine that serves it; no weight is read."""
    config = Config(
        seed=settings.seed,
        model=ModelConfig(compute_dtype=settings.dtype),
        data=DataConfig(max_prompt_tokens=settings.max_prompt_tokens),
        sampling=SamplingConfig(
            slots=settings.slots, window=1, page_size=settings.page_size, open_prompts=1, prefill_rows=1,
            max_response_tokens=settings.max_response_tokens,
        ),
    )  # fmt: skip
    components = components_lib.build(config, components_lib.model_folder(settings.model))
    engine = Engine(
        components.architecture,
        components.engine.options,
        mesh=components.mesh,
        tokenizer=components.tokenizer,
        served=settings.sampling,
    )
    return components, engine


def warm_up(engine: Engine, params: Params) -> None:
    """Compiles what serving runs, one prefill for each bucket of lengths: no client waits for the compiler."""
    state = engine.init_decode_state()
    for bucket in buckets(engine.options.max_prompt_tokens):
        prefix = engine.prefill(params=params, padded_tokens=np.zeros(bucket, np.int32), true_length=1)
        state = engine.insert(prefix, state, slot=0)
    jax.block_until_ready(engine.generate(params, state))


def summary(settings: Settings, components: components_lib.Components, engine: Engine, port: int) -> str:
    """What is served, on what, how it samples, and to whom."""
    architecture, options = engine.architecture, engine.options
    weight_bytes = architecture.num_parameters * jnp.dtype(settings.dtype).itemsize
    axes = " x ".join(f"{axis} {size}" for axis, size in engine.mesh.shape.items())
    stop = ", ".join(f"{id} {components.tokenizer.token(id)!r}" for id in options.stop_ids)
    sampling = settings.sampling
    how = f"temperature {sampling.temperature}, top_k {sampling.top_k or 'off'}, top_p {sampling.top_p}"
    longest = options.max_prompt_tokens + options.max_response_tokens
    made_for = architecture.max_positions
    public = not settings.host.startswith(LOOPBACK)
    return "\n".join(
        [
            f"model       {components.folder}: {architecture.family}, {architecture.num_parameters:,} weights in "
            f"{settings.dtype}; stops on {stop}",
            f"mesh        {axes} of {jax.devices()[0].device_kind}",
            f"memory      weights {weight_bytes / 2**20:,.1f} MiB, cache {engine.cache_bytes / 2**20:,.1f} MiB "
            f"({options.pages} pages of {options.page_size} tokens, {options.slots} slots)",
            f"lengths     prompts up to {options.max_prompt_tokens:,} tokens, responses up to "
            f"{options.max_response_tokens:,}" + (f"; the model was made for {made_for:,}" * (longest > made_for)),
            f"sampling    {'greedy' if sampling.temperature == 0 else how}, seed {settings.seed}",
            f"address     {settings.address}:{port}, gRPC without encryption or passwords: "
            + ("whoever reaches it may use it" if public else "for this machine"),
        ]
    )


async def report(servicer: Any) -> None:
    """A line now and then, while there is something to say."""
    before, tokens = None, 0
    while True:
        await asyncio.sleep(STATUS_EVERY_S)
        counts = servicer.counts
        now = dataclasses.astuple(counts)
        if now != before and any(now):
            rate = (counts.tokens - tokens) / STATUS_EVERY_S
            print(
                f"{counts.answered:,} answered, {servicer.running} running, {servicer.waiting} waiting, "
                f"{counts.refused:,} refused, {counts.hung_up:,} hung up; {rate:,.1f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
        before, tokens = now, counts.tokens


def stop_on_signals() -> asyncio.Event:
    """Set by the first SIGINT or SIGTERM; the second ends the process."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def serve(settings: Settings, components: components_lib.Components, engine: Engine) -> None:
    """Listens, reads the weights, compiles, serves until a signal comes, and ends what is running."""
    from reinforce_ada_jax.serving import servicer as servicer_lib  # noqa: PLC0415  (imports JetStream and gRPC)

    started = time.monotonic()
    with cli.user_input():
        calls = settings.slots + servicer_lib.AHEAD + settings.waiting + servicer_lib.SPARE_CALLS
        server, port = servicer_lib.make_server(
            f"{settings.address}:{settings.port}", settings.max_prompt_tokens, calls
        )
        print(summary(settings, components, engine, port), flush=True)
        _, params = huggingface.load(components.folder, components.mesh, settings.dtype)
    params = engine.load_params(params)
    warm_up(engine, params)
    driver = jetstream.orchestrator().Driver(
        # One engine for both: prefills wait for slots, so no more than a few prefixes are in memory.
        [engine], [engine], [params], [params], interleaved_mode=True, jax_padding=False,
    )  # fmt: skip
    servicer = servicer_lib.Servicer(driver, engine, settings.waiting)
    servicer_lib.pb2_grpc.add_OrchestratorServicer_to_server(servicer, server)
    stop = stop_on_signals()
    await server.start()
    print(f"ready       after {time.monotonic() - started:.1f} s; Ctrl-C stops", flush=True)
    reporting = asyncio.create_task(report(servicer))
    await stop.wait()
    reporting.cancel()
    unanswered = servicer.running + servicer.waiting
    ending = asyncio.create_task(server.stop(settings.grace_s))
    await asyncio.sleep(0)  # it has begun: nobody new is let in by the time that this is said
    if unanswered:
        print(f"stopping    {settings.grace_s:g} s are left for requests not yet answered: {unanswered}", flush=True)
    await ending
    # In a thread, for a second signal to be heard; and before this loop closes, into which the Driver calls.
    await asyncio.to_thread(driver.stop)
    print(f"stopped     {servicer.counts.answered:,} answered, {servicer.counts.tokens:,} tokens", flush=True)


def main(settings: Settings) -> None:
    """Checks what needs no weights, then serves."""
    with cli.user_input():
        settings.check()
        try:
            jetstream.orchestrator()
        except ModuleNotFoundError as error:
            raise ValueError(f"serving needs more packages ({error}): {jetstream.REMEDY}") from error
        check_address(settings.host, settings.port)
        components, engine = make_engine(settings)
    # Until the server listens to signals itself: an end without a stack trace, there is nothing to save.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asyncio.run(serve(settings, components, engine))


def define_flags() -> None:
    """A flag for each of the settings."""
    default = Settings(model="")
    flags.DEFINE_string("model", None, "A Hugging Face folder, or package:cipher.", required=True)
    flags.DEFINE_string("host", default.host, "The address to listen on; 0.0.0.0 is every network of this machine.")
    flags.DEFINE_integer("port", default.port, "The port to listen on; 0 chooses a free one and prints it.")
    flags.DEFINE_integer("slots", default.slots, "Responses decoded side by side.")
    flags.DEFINE_integer("waiting", default.waiting, "Requests that may wait for a slot; any more are refused.")
    flags.DEFINE_integer("max_prompt_tokens", default.max_prompt_tokens, "A longer prompt is refused.")
    flags.DEFINE_integer("max_response_tokens", default.max_response_tokens, "The largest max_tokens of a request.")
    flags.DEFINE_integer("page_size", default.page_size, "Tokens a page of the key/value cache holds.")
    flags.DEFINE_float("temperature", default.temperature, "0 takes the most probable token.")
    flags.DEFINE_integer("top_k", default.top_k, "Draw among so many tokens; 0 for all.")
    flags.DEFINE_float("top_p", default.top_p, "Draw among the fewest tokens with this much probability.")
    flags.DEFINE_bool("greedy", default.greedy, "The same as --temperature=0.")
    flags.DEFINE_enum("dtype", default.dtype, values.DTYPES, "Of weights, cache and arithmetic.")
    flags.DEFINE_integer("seed", default.seed, "Responses are drawn with it, in the order in which they are asked for.")
    flags.DEFINE_float("grace_s", default.grace_s, "Seconds that running responses have to end after the first signal.")


if __name__ == "__main__":
    define_flags()
    cli.run(
        lambda: main(Settings(**{field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(Settings)}))
    )
