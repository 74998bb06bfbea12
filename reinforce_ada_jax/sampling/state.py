"""Records of decoding: an engine's sizes, the state pytree of its programs, and the empty state.

They have no behaviour: decode.py has the programs, pages.py the allocation of pages.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt, UInt32

from reinforce_ada_jax.config.values import LEAST_TEMPERATURE
from reinforce_ada_jax.policy import experts
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.lora import Lora
from reinforce_ada_jax.policy.record import Record
from reinforce_ada_jax.sampling import pages as pages_lib
from reinforce_ada_jax.sampling.paged_attention import Pools, empty_pages
from reinforce_ada_jax.sampling.pages import ArrayLike, PagePool, padded_head_dim

# Output status of a request: not finished, ended by a stop token, ended by its length limit.
RUNNING, STOPPED, TRUNCATED = 0, 1, 2
# uint32 words of a sample's address: stream, prompt id (two), draw.
ADDRESS_WORDS = 4
# Responses that may be in flight for each slot: one decoding, the others waiting or on their way to the host. Several
# short responses may end in a slot within a window, and an empty queue leaves slots idle.
ROWS_PER_SLOT = 4
# Prompts that a window opens where they may end with a response: 32 of 33,000 tokens are 4 MB, and 300 would be 40.
MOST_LONG_OPENED = 32
# Texts of earlier responses: 32 MiB at most, unless more prompts are open.
MOST_DRAFT_TEXTS, MOST_DRAFT_TOKENS = 2**14, 2**23


class Sampling(Record):
    """`SamplingParams` as scalars for one response, or as arrays for queue entries or slots."""

    max_tokens: Int[ArrayLike, "*R"]  # response tokens at most
    temperature: Float[ArrayLike, "*R"]
    top_k: Int[ArrayLike, "*R"]
    top_p: Float[ArrayLike, "*R"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one response.

    Attributes:
      max_tokens: response tokens at most.
      temperature: 0 takes the most probable token; above 0 it counts as at least `LEAST_TEMPERATURE`.
      top_k: draw among the k most probable tokens; 0 for all. Below 2^31.
      top_p: draw among the fewest tokens, of those that top_k leaves, with this probability in sum; in (0, 1].
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        in_range = 0 <= self.temperature < math.inf and 0 <= self.top_k < 2**31 and 0 < self.top_p <= 1
        if not (self.max_tokens >= 1 and in_range):
            raise ValueError(
                f"{self}: max_tokens must be at least 1, temperature at least 0 and finite, top_k at least 0 and below "
                "2^31, and top_p above 0 and at most 1."
            )

    @functools.cached_property
    def as_arrays(self) -> Sampling:
        """The same as scalars for the device; thousands of requests share one."""
        return Sampling(
            max_tokens=np.asarray(self.max_tokens, np.int32),
            temperature=np.asarray(self.temperature and max(self.temperature, LEAST_TEMPERATURE), np.float32),
            top_k=np.asarray(self.top_k, np.int32), top_p=np.asarray(self.top_p, np.float32),
        )  # fmt: skip


class Prompts(Record):
    """Open prompts by row; their pages are held until the host closes them. A free row has length 1: no pages.

    The cache holds all tokens of a prompt but the last: its draws can start when `cached` is `length` - 1.
    """

    table: Int[ArrayLike, "R prompt_width"]
    length: Int[ArrayLike, " R"]  # tokens of the prompt
    last_token: Int[ArrayLike, " R"]
    cached: Int[ArrayLike, " R"]  # leading tokens whose keys and values are in the cache
    number: Int[ArrayLike, " R"]  # prompts are prefilled in this order

    @property
    def missing(self) -> Int[ArrayLike, " R"]:
        """Tokens of each prompt that are still to be prefilled."""
        return self.length - 1 - self.cached


class OpenedPrompts(Record):
    """Prompts that a window opens, in order; rows beyond the prompt table are padding."""

    row: Int[ArrayLike, " R"]
    tokens: Int[ArrayLike, "R max_prompt"]
    length: Int[ArrayLike, " R"]
    like: Int[ArrayLike, " R"]  # row of a prompt with the same first tokens, or its own row where a turn is parked
    shared: Int[ArrayLike, " R"]  # pages of that row, from the first on, that belong to the prompt
    cached: Int[ArrayLike, " R"]  # leading tokens whose keys and values are in these pages


class PromptTerms(Record):
    """Terms of the prompts in each row, which the host may set before it opens them."""

    stop_ids: Int[ArrayLike, "R stops"]  # -1 is no token
    adapter: Int[ArrayLike, " R"]  # index among the adapters in the weights; -1: none


class Requests(Record):
    """Requests on the device: those of a window's inputs, of queue entries, or of slots."""

    prompt_row: Int[ArrayLike, "*R"]  # row of the open prompt
    output_row: Int[ArrayLike, "*R"]  # row of `Outputs` that the response fills
    park_row: Int[ArrayLike, "*R"]  # prompt row that gets the response's pages when it ends; beyond the rows: none
    sampling: Sampling
    key: UInt32[ArrayLike, "*R words"]  # of the draw (`token.draw_keys`); in window inputs its address
    begun: Int[ArrayLike, "*R"] | None = None  # tokens of the response at the end of its prompt; None: no such tokens

    def with_max_tokens(self, max_tokens: Int[ArrayLike, "*R"]) -> "Requests":
        """Returns the same requests with other limits."""
        return self.replace(sampling=self.sampling.replace(max_tokens=max_tokens))


class WindowInputs(Record):
    """Host inputs of a decode window."""

    requests: Requests  # new ones, which queue behind those that wait already
    count: Int[ArrayLike, ""]  # number of requests, at the front
    cancelled: Bool[ArrayLike, " O"]  # output rows whose responses end with their next token; finished ones: any
    closing: Bool[ArrayLike, " R"]  # prompt rows to release; none of their draws runs or waits
    opened: OpenedPrompts  # prompts to open, after the release
    reserve: Int[ArrayLike, ""]  # pages that new responses must leave free, for prompts about to be opened
    park_reserve: Int[ArrayLike, ""]  # pages that parked turns must leave to responses and to those prompts
    survivors: Int[ArrayLike, " width"]  # responses seen that held at least 1, 2, ... pages of their own (admission.py)


class Queue(Record):
    """Ring of requests that wait for a slot: entries head to end - 1, each at its number modulo the size."""

    requests: Requests
    head: Int[ArrayLike, ""]
    end: Int[ArrayLike, ""]


class Slots(Record):
    """Responses that are decoded at the same time. An inactive slot is masked padding."""

    active: Bool[ArrayLike, " S"]
    requests: Requests
    token: Int[ArrayLike, " S"]  # the next input; its key and value are not in the cache yet
    position: Int[ArrayLike, " S"]  # of `token` in its sequence
    count: Int[ArrayLike, " S"]  # response tokens so far
    table: Int[ArrayLike, "S width"]
    shared: Int[ArrayLike, " S"]  # leading table entries that belong to the prompt
    used: Int[ArrayLike, " S"]  # table entries in use; those from `shared` on are the slot's own
    ring: Int[ArrayLike, " S"] | None = None  # its ring in sliding layers (rings.py); None: they have none


class Outputs(Record):
    """Responses, finished or growing, each in the row that its request named.

    The length is 0 before the first token, and again after an eviction. The host has the tokens before `start`: those
    that earlier windows reported and that were not drawn again. It gets those from `start` on, at the front.
    """

    tokens: Int[ArrayLike, "O T"]
    logprobs: Float[ArrayLike, "O T"]
    start: Int[ArrayLike, " O"]
    length: Int[ArrayLike, " O"]
    status: Int[ArrayLike, " O"]


class Drafts(Record):
    """Texts of the last responses to each prompt, from which tokens are guessed (drafts.py)."""

    text: Int[ArrayLike, "texts max_response"]
    row: Int[ArrayLike, " R"]  # of each open prompt, among the texts
    counts: Int[ArrayLike, "R 2"]  # recent guesses for each open prompt, and the right ones of them


class Routes(Record):
    """Experts of the tokens that a window computed, by layer, for the learner's forward pass.

    A response has the experts of its inputs: the prompt's last token, and all tokens of the response but the last.
    They begin with the input of the token at `Outputs.start`.
    """

    of_responses: UInt[ArrayLike, "O new LC"]
    of_prompts: UInt[ArrayLike, "N LC"]  # of prefilled tokens, in the order of the chunks
    row: Int[ArrayLike, " N"]  # prompt row of each; beyond the rows in padding
    position: Int[ArrayLike, " N"]  # in the prompt
    count: Int[ArrayLike, ""]  # of prefilled tokens, padding of chunks included


class WindowCounts(Record):
    """Work of one window; the counts of guesses are None where the engine guesses nothing."""

    decode_steps: Int[ArrayLike, ""]  # each by all slots
    busy: Int[ArrayLike, ""]  # slot-steps that made a token
    redone: Int[ArrayLike, ""]  # tokens of responses that lost their slots and start again
    verified: Any = None  # guesses that had a row of the model
    accepted: Any = None  # of these, tokens of a response


class Occupancy(Record):
    """Pages, prompt rows, queue entries and slots in use: the part of a state that the host can check."""

    pool: PagePool
    prompts: Prompts
    queue: Queue
    slots: Slots


class DecodeState(Occupancy):
    """Everything that decoding carries from one decode step to the next; programs take it by donation and return it."""

    pools: Pools
    prompt_tokens: Int[ArrayLike, "R max_prompt"]
    outputs: Outputs
    seed: Int[ArrayLike, ""]
    terms: PromptTerms
    counts: WindowCounts
    drafts: Drafts | None = None  # None: the engine guesses nothing
    routes: Routes | None = None  # of this window; None: they are not recorded


def occupancy(state: DecodeState) -> Occupancy:
    """Returns the small records of a state."""
    return Occupancy(pool=state.pool, prompts=state.prompts, queue=state.queue, slots=state.slots)


class WindowOutputs(Record):
    """Outputs of a decode window, copied so that the next window may begin before the host reads them."""

    rows: Outputs  # new tokens of responses; status other than RUNNING where one ended in this window
    waiting: Int[ArrayLike, ""]  # requests that no slot has taken yet
    free_pages: Int[ArrayLike, ""]  # at the end of the window
    prompt_length: Int[ArrayLike, " R"]  # of each prompt row at the end of the window; above 1 where a turn is parked
    counts: WindowCounts
    routes: Routes | None = None
    agreed: Int[ArrayLike, "2"] | None = None  # largest vote, most steps of a replica in the window before


class Prefix(Record):
    """Contiguous keys and values of prompts, from which pages are filled."""

    keys: Float[ArrayLike, "L B T K H"]
    values: Float[ArrayLike, "L B T K H"]
    length: Int[ArrayLike, " B"]  # tokens of the prompt; 0 for a padding row
    last_token: Int[ArrayLike, " B"]


def kv_token_bytes(a: Architecture, dtype: str, attention: str = "jnp", kv_dtype: str = "model") -> int:
    """Returns bytes of one token's keys and values in all layers, as wide as the backend's pages; int8 has scales."""
    number, scale = (1, 4) if kv_dtype == "int8" else (jnp.dtype(dtype).itemsize, 0)
    return 2 * a.num_layers * a.num_kv_heads * (padded_head_dim(a.head_dim, attention) * number + scale)


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Sizes and numbers of one replica of an engine; the static ones fix the compiled programs."""

    slots: int
    window: int
    page_size: int
    pages: int
    open_prompts: int
    prefill_tokens: int
    max_prompt_tokens: int
    max_response_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    dtype: str  # of matrices and products
    apart: bool = False  # weights of layers are arrays of their own (`policy/apart.py`)
    rounds: bool = False  # products round to `dtype`, bfloat16, and all else is float32 (`policy/rounded.py`)
    attention: str = "jnp"
    kv_dtype: str = "model"  # of the pages: "model", as `dtype` says, or "int8"
    weight_dtype: str = "model"  # of the matrices: "model", as `dtype` says, or "int8"
    adapters: Lora | None = None  # decoded beside their base; None: there are none, or they are merged
    begun_tokens: int = 0  # most tokens of a response at the end of its prompt (`Request.begun`); 0: none goes on
    finishes: bool = False  # a collection's end cuts no response: they go on only if it is broken off
    drafts: int = 0  # most tokens that a step guesses and verifies for a slot (drafts.py)
    draft_rows: int = 0  # rows up to which guesses may lengthen a step; beyond them they only fill idle rows
    row_time: float = 0.0  # of one more row in a step, in times of reading all weights (draft_choice.py)
    token_time: float = 0.0  # likewise of reading a cached token
    keep_drafts: bool = False  # texts of earlier iterations, too
    ring_window: int = 0  # tokens that sliding layers see, whose pages are rings (rings.py); 0: pages of the pool
    records_experts: bool = False  # windows report the experts of each token (`Routes`)
    tail: tuple[int, ...] = ()  # each n: with an empty queue, a step may compute 1/n of the slots
    check_invariants: bool = False  # after every window (invariants.py); changes nothing but time

    def check_prompt(self, length: int) -> None:
        """Raises ValueError unless a prompt of this many tokens can be opened."""
        if not 1 <= length <= self.longest_prompt:
            raise ValueError(
                f"a prompt has {length} tokens, and the engine takes 1 to {self.longest_prompt}. Send a shorter "
                "one, or raise data.max_prompt_tokens: prompts are never cut."
            )

    @property
    def activations(self) -> str:
        """Type of activations, and of cached keys and values that are not int8."""
        return "float32" if self.rounds else self.dtype

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of slots that a step may compute, all of them first; the program has a loop for each."""
        return (self.slots, *(self.slots // part for part in self.tail if self.slots >= part))

    @property
    def draft_texts(self) -> int:
        """Texts of earlier responses; two prompts may share one."""
        return max(self.open_prompts, min(MOST_DRAFT_TEXTS, MOST_DRAFT_TOKENS // self.max_response_tokens))

    @property
    def output_rows(self) -> int:
        """Responses in flight."""
        return ROWS_PER_SLOT * self.slots

    @property
    def most_new_tokens(self) -> int:
        """Tokens that a response may get in a window."""
        return min(self.max_response_tokens, self.window * (1 + self.drafts))

    @property
    def most_prefilled(self) -> int:
        """Tokens that a window may prefill where it records their experts."""
        return self.window * self.prefill_tokens

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def table_width(self) -> int:
        """Pages of the longest prompt with the longest response."""
        return pages_lib.num_pages(self.most_tokens, self.page_size)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, those of a response that goes on included."""
        return self.max_prompt_tokens + self.begun_tokens

    @property
    def opened_rows(self) -> int:
        """Prompts that a window may open: inputs have the longest prompt for each, so few where prompts are long."""
        return min(self.open_prompts, MOST_LONG_OPENED) if self.begun_tokens else self.open_prompts

    @property
    def prompt_width(self) -> int:
        """Pages of the longest prompt."""
        return pages_lib.num_pages(self.longest_prompt, self.page_size)


def empty_occupancy(o: EngineOptions) -> Occupancy:
    """Returns records of no open prompt, no active slot and free pages."""

    def integers(*shape: int) -> Any:
        return jnp.zeros(shape, jnp.int32)

    def requests(rows: int) -> Requests:
        floats = dict(temperature=jnp.ones(rows, jnp.float32), top_p=jnp.ones(rows, jnp.float32))
        return Requests(
            prompt_row=integers(rows), output_row=integers(rows), park_row=integers(rows) + o.open_prompts,
            sampling=Sampling(max_tokens=integers(rows), top_k=integers(rows), **floats),
            key=jnp.zeros((rows, 2), jnp.uint32),
            begun=integers(rows) if o.begun_tokens else None,
        )  # fmt: skip

    slots, prompts = o.slots, o.open_prompts
    return Occupancy(
        pool=pages_lib.make_pool(o.pages),
        prompts=Prompts(
            table=integers(prompts, o.prompt_width), length=jnp.ones(prompts, jnp.int32), last_token=integers(prompts),
            cached=integers(prompts), number=integers(prompts),
        ),
        queue=Queue(requests=requests(o.output_rows), head=integers(), end=integers()),
        slots=Slots(
            active=jnp.zeros(slots, bool), requests=requests(slots), token=integers(slots), position=integers(slots),
            count=integers(slots), table=integers(slots, o.table_width), shared=integers(slots), used=integers(slots),
            ring=jnp.arange(slots, dtype=jnp.int32) if o.ring_window else None,
        ),
    )  # fmt: skip


def default_terms(o: EngineOptions) -> PromptTerms:
    """Returns the terms of prompts that end with the engine's stop tokens and have no adapter."""
    stop_ids = np.tile(np.asarray(o.stop_ids, np.int32)[None], (o.open_prompts, 1))
    return PromptTerms(stop_ids=stop_ids, adapter=np.full(o.open_prompts, -1, np.int32))


def empty_state(o: EngineOptions, architecture: Architecture, total_pages: int) -> DecodeState:
    """Returns a state with no prompt open, no slot active, and every page free, of `total_pages` of all layers."""
    shape = (architecture.num_kv_heads, total_pages, o.page_size, padded_head_dim(architecture.head_dim, o.attention))
    dtype, zero = None if o.kv_dtype == "int8" else jnp.dtype(o.activations), jnp.int32(0)
    counts, drafts = WindowCounts(decode_steps=zero, busy=zero, redone=zero), None
    if o.drafts:
        counts = counts.replace(verified=zero, accepted=zero)
        drafts = Drafts(
            text=jnp.full((o.draft_texts, o.max_response_tokens), -1, jnp.int32),
            row=jnp.zeros(o.open_prompts, jnp.int32),
            counts=jnp.zeros((o.open_prompts, 2), jnp.int32),
        )
    routes = None
    if o.records_experts:
        of_responses = experts.empty_record(architecture, o.output_rows, o.most_new_tokens)
        of_prompts = experts.empty_record(architecture, o.most_prefilled)
        place = jnp.zeros(o.most_prefilled, jnp.int32)
        routes = Routes(jnp.asarray(of_responses), jnp.asarray(of_prompts), place, place, zero)
    return DecodeState(
        **vars(empty_occupancy(o)),
        pools=(empty_pages(shape, dtype), empty_pages(shape, dtype)),
        prompt_tokens=jnp.zeros((o.open_prompts, o.longest_prompt), jnp.int32),
        outputs=Outputs(
            tokens=jnp.zeros((o.output_rows, o.max_response_tokens), jnp.int32),
            logprobs=jnp.zeros((o.output_rows, o.max_response_tokens), jnp.float32),
            start=jnp.zeros(o.output_rows, jnp.int32),
            length=jnp.zeros(o.output_rows, jnp.int32),
            status=jnp.zeros(o.output_rows, jnp.int32),
        ),
        seed=jnp.int32(o.seed),
        terms=jax.tree.map(jnp.asarray, default_terms(o)),
        counts=counts,
        drafts=drafts,
        routes=routes,
    )
