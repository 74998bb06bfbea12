"""The HTTP interface that OpenAI's clients speak: routes, keys, limits, and requests into the sampler."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import prometheus_client
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from reinforce_ada_jax.sampling.programs import num_replicas
from reinforce_ada_jax.sampling.state import SamplingParams
from reinforce_ada_jax.serving.http import HUNG_UP, Bodies, Refusal, Served, check_json_values, has_key
from reinforce_ada_jax.serving.openai import protocol
from reinforce_ada_jax.serving.openai.answer import Answer
from reinforce_ada_jax.serving.openai.call import Backend, Call, PromptText, Terms
from reinforce_ada_jax.serving.openai.metrics import Metrics
from reinforce_ada_jax.serving.openai.protocol import ChatRequest, CompletionRequest, Invalid
from reinforce_ada_jax.serving.response_text import prompt_pieces
from reinforce_ada_jax.serving.settings import ServerSettings

# The text of a token is seldom longer: a prompt with more characters a token is refused before it is encoded.
BYTES_PER_TOKEN = 64
# Most values in the JSON of a request, such as the tokens of its prompts. The event loop parses them in 0.3 s.
MAX_VALUES = 300_000
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Handler = Callable[[Request], Awaitable[Response]]


class App:
    def __init__(self, settings: ServerSettings, models: Sequence[Served], wake: threading.Event):
        """`wake` is set when there is something to sample."""
        self.settings, self.models = settings, {each.name: each for each in models}
        self._wake, self.num_open = wake, 0  # num_open: responses that are not finished
        self.metrics = Metrics(self._num_running, lambda: self.num_open)
        self.backends: dict[str, Backend] = {}  # by model; empty until the models are loaded
        self._num_requests = 0
        self._calls: set[Call] = set()
        self._is_ending = False
        self._bodies = Bodies()
        # One thread: a template's limits are counted in one rendering at a time.
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")

    def stop(self) -> None:
        """Ends running requests after --grace_s, and prints how many there are; later requests are refused."""
        grace_s, running = self.settings.grace_s, len(self._calls)
        if running:
            print(f"stopping    {grace_s:g} s are left for requests not yet answered: {running}", flush=True)
        asyncio.get_running_loop().call_later(grace_s, self._end_all)

    def _end_all(self) -> None:
        self._is_ending = True
        for call in list(self._calls):
            call.fail(_stopping())
        self._wake.set()

    def _num_running(self) -> int:
        return sum(backend.sampler.num_running for backend in self.backends.values())

    def asgi(self) -> Starlette:
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._guarded(self._metrics_page), methods=["GET"]),
            Route("/v1/models", self._guarded(self._list_models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._describe_model), methods=["GET"]),
            Route("/v1/completions", self._guarded(self._completions, "completions"), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat_completions, "chat"), methods=["POST"]),
        ]

        async def no_route(request: Request, error: Exception) -> Response:
            async def refuse(_: Request) -> Response:
                assert isinstance(error, HTTPException)
                why = f"{request.method} {request.url.path:.200}: this server does not have it."
                raise Refusal(error.status_code, why)

            return await self._guarded(refuse)(request)

        return Starlette(routes=routes, exception_handlers={HTTPException: no_route})

    def _guarded(self, handler: Handler, endpoint: str = "") -> Handler:
        """Returns a handler that checks the key and answers errors; an `endpoint` needs models, and is counted."""

        async def answer(request: Request) -> Response:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            try:
                if self.settings.api_key and (scheme.lower() != "bearer" or not has_key(given, self.settings.api_key)):
                    raise Refusal(401, "the API key is not that of this server (--api_key).")
                if endpoint and not self.backends:
                    raise Refusal(503, "the server reads weights and compiles: try again in some seconds.")
                response = await handler(request)
            except Refusal as refusal:
                response = protocol.error_response(refusal)
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                response = protocol.error_response(Refusal(500, f"{type(error).__name__}: {error!s:.300}"))
            if endpoint:
                self.metrics.requests.labels(endpoint, response.status_code).inc()
            return response

        return answer

    # ---- what is asked without a model ---------------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        if self.backends:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "loading"}, status_code=503)

    async def _metrics_page(self, _: Request) -> Response:
        page = prometheus_client.generate_latest(self.metrics.registry)
        return Response(page, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    def _description(self, name: str) -> dict[str, Any]:
        longest = self.models[name].engine.options.most_tokens
        return {"id": name, "object": "model", "created": 0, "owned_by": "local", "max_model_len": longest}

    async def _list_models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description(name) for name in self.models]})

    async def _describe_model(self, request: Request) -> Response:
        return JSONResponse(self._description(self._served(request.path_params["name"]).name))

    def _served(self, name: str) -> Served:
        if name not in self.models:
            names = ", ".join(self.models)
            raise Invalid(
                f"the model {name!r:.160} does not exist; this server has {names}.", "model", "model_not_found", 404
            )
        return self.models[name]

    # ---- completions ---------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        asked = protocol.parse(CompletionRequest, await self._body(request))
        served = self._served(asked.model)
        if not asked.prompts:
            raise Invalid("the prompt is an empty list.", "prompt")
        if asked.max_tokens == 0 and not asked.echo:
            raise Invalid("max_tokens is 0, and nothing is shown: set echo, or draw at least one token.", "max_tokens")

        most = protocol.DEFAULT_COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        terms = self._terms(asked, served, most)
        self._admit(served, terms.num_samples * len(asked.prompts))
        prompts: list[PromptText] = []
        for prompt in asked.prompts:  # one at a time, so that prompts of other requests come between
            prompts.append(await self._tokenize(served, partial(_prompt, served, prompt, echo=bool(asked.echo))))
            if await request.is_disconnected():
                return Response(status_code=HUNG_UP)
        return await self._answer(request, asked, served, prompts, terms)

    async def _chat_completions(self, request: Request) -> Response:
        asked = protocol.parse(ChatRequest, await self._body(request))
        served = self._served(asked.model)
        messages = protocol.template_messages(asked.messages)

        def render() -> PromptText:
            text = served.tokenizer.render_messages(messages, asked.offered_tools)
            # The template writes BOS itself where the model has one.
            return _prompt(served, text, add_special_tokens=False)

        most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        terms = self._terms(asked, served, most)
        self._admit(served, terms.num_samples)
        return await self._answer(request, asked, served, [await self._tokenize(served, render)], terms)

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A page of another web site can make a browser send other content types.
            raise Refusal(415, "send the header Content-Type: application/json.")
        body = await self._bodies.read(request, self.settings.request_mib * 2**20, self.settings.request_s)
        check_json_values(body, MAX_VALUES)
        return body

    async def _tokenize(self, served: Served, make_prompt: Callable[[], PromptText]) -> PromptText:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, make_prompt)
        except ValueError as error:
            # Clients do not learn where the folder is.
            raise Invalid(str(error).replace(str(served.tokenizer.folder), served.name)) from error

    def _terms(self, asked: CompletionRequest | ChatRequest, served: Served, max_tokens: int | None) -> Terms:
        longest, default = served.engine.options.max_response_tokens, self.settings.sampling
        max_tokens = longest if max_tokens is None else max_tokens
        if max_tokens > longest:
            raise Invalid(
                f"max_tokens is {max_tokens:,}; it must be 1 to {longest:,} (--max_response_tokens).", "max_tokens"
            )
        sampling = SamplingParams(
            max(max_tokens, 1),
            default.temperature if asked.temperature is None else asked.temperature,
            default.top_k if asked.top_k is None else max(asked.top_k, 0),
            default.top_p if asked.top_p is None else asked.top_p,
        )
        is_completion, num_top = isinstance(asked, CompletionRequest), asked.num_top_logprobs
        echoes = isinstance(asked, CompletionRequest) and bool(asked.echo)
        # At temperature 0 the sampler knows the most probable token: it is the one that it drew.
        scored = num_top is not None and (echoes or num_top > int(sampling.temperature == 0))
        if scored and served.engine.spans_processes:
            raise Invalid(
                "this server runs over several processes, which score no texts: ask for logprobs=true (0 in "
                "completions), no top_logprobs and no echo, or start it in one process.",
                "logprobs",
            )
        return Terms(
            asked.n or 1, sampling, asked.seed, asked.stops, keep_pieces=num_top is not None,
            keep_end=num_top is not None and is_completion, goes_on=is_completion, scored=scored, draws=max_tokens > 0,
        )  # fmt: skip

    async def _answer(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        served: Served,
        prompts: Sequence[PromptText],
        terms: Terms,
    ) -> Response:
        if self._is_ending:
            raise _stopping()
        self._admit(served, terms.num_samples * len(prompts))  # again: others were admitted while these were encoded
        self._num_requests += 1
        name, backend = f"request {self._num_requests}", self.backends[served.name]
        call = Call(prompts, terms, served.tokenizer, backend, name, self._response_ended)
        self._calls.add(call)
        self.num_open += len(call.choices)
        self.metrics.prompt_tokens.inc(call.num_prompt_tokens)
        call.submit()
        self._wake.set()
        answer = Answer(asked, call, self._tokenizing)
        if asked.stream:
            return StreamingResponse(
                answer.events(), media_type="text/event-stream", headers=STREAM_HEADERS,
                background=BackgroundTask(self._end_call, call),
            )  # fmt: skip
        watch = asyncio.create_task(_cancel_after_hang_up(request, call))
        try:
            await call.finished()
            if call.is_cancelled:
                return Response(status_code=HUNG_UP)
            return await answer.made(lambda: JSONResponse(answer.whole()))
        finally:
            watch.cancel()
            await self._end_call(call)

    def _admit(self, served: Served, num_responses: int) -> None:
        # Every copy of the model has its own slots.
        most = num_replicas(served.engine.mesh) * self.settings.slots + self.settings.waiting
        if not 1 <= num_responses <= most:
            raise Invalid(
                f"{num_responses:,} responses are asked for; a request may have 1 to {most:,} (--waiting).", "n"
            )
        if self.num_open + num_responses > most:
            raise Refusal(429, f"{self.num_open:,} responses are running or waiting (--waiting): try again later.")

    def _response_ended(self, num_tokens: int) -> None:
        self.num_open -= 1
        self.metrics.generated_tokens.inc(num_tokens)

    async def _end_call(self, call: Call) -> None:
        call.cancel()
        self._calls.discard(call)
        if call.is_cancelled:
            self.metrics.cancelled.inc()
        self._wake.set()  # slots to free
        self.metrics.request_s.observe(call.seconds)
        if call.first_token_s is not None:
            self.metrics.first_token_s.observe(call.first_token_s)


def _prompt(
    served: Served, prompt: str | list[int], *, echo: bool = False, add_special_tokens: bool = True
) -> PromptText:
    longest, vocabulary = served.engine.options.max_prompt_tokens, served.engine.architecture.vocab_size
    if isinstance(prompt, str):
        if len(prompt) > longest * BYTES_PER_TOKEN:
            why = f"the prompt has {len(prompt):,} characters, more than {longest:,} tokens can have"
            raise Invalid(f"{why} (--max_prompt_tokens).", "prompt", "context_length_exceeded")
        tokens = served.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    elif all(0 <= token < vocabulary for token in prompt):
        tokens = np.asarray(prompt, np.int32)
    else:
        raise Invalid(f"the prompt has token ids outside of the vocabulary, 0 to {vocabulary - 1:,}.", "prompt")
    if not 1 <= len(tokens) <= longest:
        raise Invalid(
            f"the prompt has {len(tokens):,} tokens, this server takes 1 to {longest:,} (--max_prompt_tokens).",
            "prompt", "context_length_exceeded" if len(tokens) else None,
        )  # fmt: skip
    given = prompt if isinstance(prompt, str) else None
    return PromptText(tokens, prompt_pieces(served.tokenizer, tokens, given) if echo else ())


def _stopping() -> Refusal:
    return Refusal(503, "the server stops: it ended the response after --grace_s.")


async def _cancel_after_hang_up(request: Request, call: Call) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    call.cancel()
