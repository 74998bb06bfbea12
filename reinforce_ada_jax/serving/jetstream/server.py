"""A gRPC server from start to end: it listens, loads, compiles, serves until a signal comes, and finishes its work."""

import asyncio
import dataclasses
import functools
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable

import jax
import numpy as np

from reinforce_ada_jax import cli
from reinforce_ada_jax.distributed.compilation import EarlyCompilation
from reinforce_ada_jax.distributed.mesh import describe
from reinforce_ada_jax.learning.platform import describe_dtype
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.engine import buckets
from reinforce_ada_jax.serving import jetstream
from reinforce_ada_jax.serving.jetstream import servicer as servicer_lib
from reinforce_ada_jax.serving.jetstream.engine import JetStreamEngine
from reinforce_ada_jax.serving.settings import ServerSettings

STATUS_EVERY_S = 10.0


def warm_up(engine: JetStreamEngine, params: Params) -> None:
    """Compiles all programs of serving, a prefill for each bucket of lengths: no client waits for the compiler."""
    state = engine.init_decode_state()
    for bucket in buckets(engine.engine.options.max_prompt_tokens):
        prefix = engine.prefill(params=params, padded_tokens=np.zeros(bucket, np.int32), true_length=1)
        state = engine.insert(prefix, state, slot=0)
    jax.block_until_ready(engine.generate(params, state))


def summary(settings: ServerSettings, folder: pathlib.Path, served: JetStreamEngine, port: int) -> str:
    """Returns the lines on model, memory, sampling and address that are printed at the start."""
    engine, sampling = served.engine, settings.sampling
    architecture, options = engine.architecture, engine.options
    weight_bytes = architecture.num_parameters * engine.dtype.itemsize
    stop = ", ".join(f"{id} {served.tokenizer.token(id)!r}" for id in options.stop_ids)
    draws = f"temperature {sampling.temperature}, top_k {sampling.top_k or 'off'}, top_p {sampling.top_p}"
    beyond = architecture.beyond(options.most_tokens)
    public = not settings.is_loopback
    precision = describe_dtype(engine.dtype, jax.default_backend(), architecture.num_parameters)
    return "\n".join([
        f"model       {folder}: {architecture.family}, {architecture.described_size}; stops on {stop}; "
        f"{precision}",
        f"mesh        {describe(engine.mesh)} of {jax.devices()[0].device_kind}",
        f"memory      weights {weight_bytes / 2**20:,.1f} MiB, cache {engine.cache_bytes / 2**20:,.1f} MiB "
        f"({options.pages} pages of {options.page_size} tokens, {options.slots} slots)",
        f"lengths     prompts up to {options.max_prompt_tokens:,} tokens, responses up to "
        f"{options.max_response_tokens:,}{beyond}",
        f"sampling    {'greedy' if sampling.temperature == 0 else draws}, seed {settings.seed}",
        f"address     {settings.address}:{port}, gRPC without encryption or passwords: "
        + ("anyone who reaches it may use it" if public else "for this machine")
        + "; not ready yet, calls wait",
    ])  # fmt: skip


async def print_status(servicer: servicer_lib.Servicer) -> None:
    """Prints a line every ten seconds, if the counts have changed."""
    before, tokens = None, 0
    while True:
        await asyncio.sleep(STATUS_EVERY_S)
        counts = servicer.counts
        now = dataclasses.astuple(counts)
        if now != before and any(now):
            rate = (counts.tokens - tokens) / STATUS_EVERY_S
            calls = f"{counts.answered:,} answered, {servicer.running} running, {servicer.waiting} waiting"
            ended = f"{counts.refused:,} refused, {counts.hung_up:,} hung up"
            print(f"{calls}, {ended}; {rate:,.1f} tokens/s", file=sys.stderr, flush=True)
        before, tokens = now, counts.tokens


def stop_on_signals() -> asyncio.Event:
    """Returns an event that the first SIGINT or SIGTERM sets; the second ends the process."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def serve(
    settings: ServerSettings, folder: pathlib.Path, engine: JetStreamEngine, load: Callable[[], Params]
) -> None:
    """Serves until a signal comes; `load` returns the weights of the model."""
    started = time.monotonic()
    with cli.user_input():
        server, port = servicer_lib.make_server(f"{settings.address}:{settings.port}", settings.max_prompt_tokens)
        print(summary(settings, folder, engine, port), flush=True)
        compilation = EarlyCompilation()
        ready = compilation.add(engine.engine.token_programs())
        params = engine.load_params(load())
    with compilation:
        ready(functools.cache(functools.partial(print, file=sys.stderr, flush=True)))  # each text once
    warm_up(engine, params)
    driver = jetstream.orchestrator().Driver(
        # One engine prefills and decodes: prefills wait for slots, so only a few prefixes are in memory.
        [engine], [engine], [params], [params], interleaved_mode=True, jax_padding=False,
    )  # fmt: skip
    servicer = servicer_lib.Servicer(driver, engine.engine, engine.tokenizer, settings)
    servicer.add_to(server)
    stop = stop_on_signals()
    await server.start()
    print(f"ready       after {time.monotonic() - started:.1f} s; Ctrl-C stops", flush=True)
    status = asyncio.create_task(print_status(servicer))
    await stop.wait()
    status.cancel()
    unanswered = servicer.running + servicer.waiting
    ending = asyncio.create_task(server.stop(settings.grace_s))
    await asyncio.sleep(0)  # lets the stop begin: after the next line is printed, no new call is accepted
    if unanswered:
        print(f"stopping    {settings.grace_s:g} s are left for requests not yet answered: {unanswered}", flush=True)
    await ending
    # In a thread, so that a second signal is noticed; before the event loop closes, because the Driver calls into it.
    await asyncio.to_thread(driver.stop)
    print(f"stopped     {servicer.counts.answered:,} answered, {servicer.counts.tokens:,} tokens", flush=True)
