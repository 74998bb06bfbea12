"""What decoding carries: the sizes of an engine, the state pytree of its programs, and the state they begin with.

Frozen records without behaviour; what happens to them is in decode.py, and who holds which page in pages.py.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.sampling import pages as pages_lib
from reinforce_ada_jax.sampling.pages import PagePool
from reinforce_ada_jax.sampling.pallas_attention import padded_head_dim

# Output status of a request: not finished, ended by a stop token, ended by its length limit.
RUNNING, STOPPED, TRUNCATED = 0, 1, 2
# uint32 words of a sample's address: stream, prompt id (two), draw.
ADDRESS_WORDS = 4
# Responses that may be in flight for each slot: one decoding, the others waiting or on their way to the host. Short
# responses end several to a slot and window, and a queue that runs dry inside a window leaves slots idle.
ROWS_PER_SLOT = 4


@struct.dataclass
class Sampling:
    """How responses are drawn (`SamplingParams`): scalars for one, arrays for the rows of a queue or the slots."""

    max_tokens: Int[Array, " R"]  # response tokens at most
    temperature: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one response is drawn.

    Attributes:
      max_tokens: response tokens at most.
      temperature: 0 takes the most probable token.
      top_k: draw among so many of the most probable tokens; 0 for all.
      top_p: draw among the fewest tokens that hold this much probability, of what top_k left; in (0, 1].
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not (self.max_tokens >= 1 and 0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(
                f"{self}: max_tokens must be at least 1, temperature at least 0 and finite, top_k at least 0, and "
                "top_p above 0 and at most 1."
            )

    def as_arrays(self) -> Sampling:
        """The same, as the device has it."""
        return Sampling(
            max_tokens=np.int32(self.max_tokens), temperature=np.float32(self.temperature),
            top_k=np.int32(self.top_k), top_p=np.float32(self.top_p),
        )  # fmt: skip


@struct.dataclass
class Prompts:
    """Open prompts, a row each: their pages are held until the host closes them."""

    table: Int[Array, "R prompt_width"]
    length: Int[Array, " R"]  # tokens of the prompt; the cache holds all but the last
    last_token: Int[Array, " R"]


@struct.dataclass
class WindowInputs:
    """What the host hands over with a window.

    Attributes:
      prompt_row: of each request, where its prompt is open.
      output_row: of each request, the row of `Outputs` that it will fill.
      address: of each request.
      sampling: of each request.
      count: requests; the first so many entries. They stand behind those that wait already.
      closing: prompt rows of which no draw is running or waiting, to be given up.
      reserve: pages that new responses must leave free, for prompts about to be opened.
    """

    prompt_row: Int[Array, " Q"]
    output_row: Int[Array, " Q"]
    address: UInt32[Array, "Q 4"]
    sampling: Sampling
    count: Int[Array, ""]
    closing: Bool[Array, " R"]
    reserve: Int[Array, ""]


@struct.dataclass
class PrefillBatch:
    """Prompts of about one length, right-padded; rows of the prompt table beyond its end are padding."""

    tokens: Int[Array, "B T"]
    length: Int[Array, " B"]
    rows: Int[Array, " B"]


@struct.dataclass
class Queue:
    """Requests that wait for a slot: a ring, in which entry i stands at i modulo its size. [head, end) wait."""

    prompt_row: Int[Array, " Q"]
    output_row: Int[Array, " Q"]
    key: UInt32[Array, "Q 2"]
    sampling: Sampling
    head: Int[Array, ""]
    end: Int[Array, ""]


@struct.dataclass
class Slots:
    """What is being decoded side by side. An inactive slot is masked padding."""

    active: Bool[Array, " S"]
    token: Int[Array, " S"]  # the next input; its key and value are not in the cache yet
    position: Int[Array, " S"]  # of `token` in its sequence
    count: Int[Array, " S"]  # response tokens so far
    sampling: Sampling
    key: UInt32[Array, "S 2"]
    output_row: Int[Array, " S"]
    table: Int[Array, "S width"]
    shared: Int[Array, " S"]  # leading table entries that belong to the prompt
    used: Int[Array, " S"]  # table entries in use; those from `shared` on are the slot's own


@struct.dataclass
class Outputs:
    """Responses, finished or growing, each in the row that its request named."""

    tokens: Int[Array, "O max_response"]
    logprobs: Float[Array, "O max_response"]
    length: Int[Array, " O"]
    status: Int[Array, " O"]


@struct.dataclass
class DecodeState:
    """Everything that decoding carries from one decode step to the next, donated to each program and given back."""

    key_pages: Float[Array, "K L*pages page_size padded_H"]
    value_pages: Float[Array, "K L*pages page_size padded_H"]
    pool: PagePool
    prompts: Prompts
    queue: Queue
    slots: Slots
    outputs: Outputs
    seed: Int[Array, ""]
    stop_ids: Int[Array, " stops"]
    busy: Int[Array, ""]  # slot-steps that made a token in this window
    decode_steps: Int[Array, ""]  # taken in this window


@struct.dataclass
class WindowOutputs:
    """What the host reads of a window: a copy, so that the next window may begin before it is read.

    Attributes:
      rows: status other than RUNNING where a response ended in this window.
      waiting: requests that no slot has taken yet.
      free_pages: at the end of the window.
      busy: slot-steps that made a token.
      decode_steps: steps taken, each by all slots.
    """

    rows: Outputs
    waiting: Int[Array, ""]
    free_pages: Int[Array, ""]
    busy: Int[Array, ""]
    decode_steps: Int[Array, ""]


@struct.dataclass
class Prefix:
    """Keys and values of prompts, contiguous: what prefill gives, and what pages are filled from."""

    keys: Float[Array, "L B T K H"]
    values: Float[Array, "L B T K H"]
    length: Int[Array, " B"]  # tokens of the prompt; 0 for a padding row
    last_token: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Sizes and numbers of one replica of an engine; the static ones fix the compiled programs."""

    slots: int
    window: int
    page_size: int
    pages: int
    open_prompts: int
    prefill_rows: int
    max_prompt_tokens: int
    max_response_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    dtype: str
    attention: str = "jnp"
    check_invariants: bool = False  # after every window (invariants.py); changes nothing but time

    def padded_head_dim(self, architecture: Architecture) -> int:
        """Numbers that a page holds for each token and head: the head dim, padded with zeros for some kernels."""
        return padded_head_dim(architecture.head_dim, self.attention)

    @property
    def output_rows(self) -> int:
        """Responses in flight."""
        return ROWS_PER_SLOT * self.slots

    @property
    def table_width(self) -> int:
        """Pages of the longest prompt with the longest response."""
        return pages_lib.num_pages(self.max_prompt_tokens + self.max_response_tokens, self.page_size)

    @property
    def prompt_width(self) -> int:
        """Pages of the longest prompt."""
        return pages_lib.num_pages(self.max_prompt_tokens, self.page_size)


def empty_state(o: EngineOptions, architecture: Architecture | None = None) -> DecodeState:
    """Returns a state with no prompt open, no slot active, and every page free.

    Without an architecture it is in numpy, without cache and outputs: the window model's.
    """
    xp = np if architecture is None else jnp

    def integers(*shape):
        return xp.zeros(shape, xp.int32)

    def sampling(rows):
        floats = dict(temperature=xp.ones(rows, xp.float32), top_p=xp.ones(rows, xp.float32))
        return Sampling(max_tokens=integers(rows), top_k=integers(rows), **floats)

    slots, outputs, key_pages, value_pages = o.slots, None, None, None
    if architecture is not None:
        pages = (architecture.num_layers * o.pages, o.page_size, o.padded_head_dim(architecture))
        key_pages, value_pages = (xp.zeros((architecture.num_kv_heads, *pages), xp.dtype(o.dtype)) for _ in range(2))
        outputs = Outputs(
            tokens=integers(o.output_rows, o.max_response_tokens),
            logprobs=xp.zeros((o.output_rows, o.max_response_tokens), xp.float32),
            length=integers(o.output_rows),
            status=integers(o.output_rows),
        )
    return DecodeState(
        key_pages=key_pages,
        value_pages=value_pages,
        pool=pages_lib.make_pool(o.pages, xp),
        prompts=Prompts(
            table=integers(o.open_prompts, o.prompt_width),
            length=xp.ones(o.open_prompts, xp.int32),
            last_token=integers(o.open_prompts),
        ),
        queue=Queue(
            prompt_row=integers(o.output_rows),
            output_row=integers(o.output_rows),
            key=xp.zeros((o.output_rows, 2), xp.uint32),
            sampling=sampling(o.output_rows),
            head=integers(),
            end=integers(),
        ),
        slots=Slots(
            active=xp.zeros(slots, bool),
            token=integers(slots),
            position=integers(slots),
            count=integers(slots),
            sampling=sampling(slots),
            key=xp.zeros((slots, 2), xp.uint32),
            output_row=integers(slots),
            table=integers(slots, o.table_width),
            shared=integers(slots),
            used=integers(slots),
        ),
        outputs=outputs,
        seed=xp.int32(o.seed),
        stop_ids=xp.asarray(o.stop_ids, xp.int32),
        busy=integers(),
        decode_steps=integers(),
    )
