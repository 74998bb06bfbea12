"""What decoding carries: the sizes of an engine, the state pytree of its programs, and the state they begin with.

Frozen records without behaviour; what happens to them is in decode.py, and who holds which page in pages.py.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.sampling import pages as pages_lib
from reinforce_ada_jax.sampling import token as token_lib
from reinforce_ada_jax.sampling.pages import PagePool

# Output status of a request: not finished, ended by a stop token, ended by its length limit.
RUNNING, STOPPED, TRUNCATED = 0, 1, 2


@struct.dataclass
class Prompts:
    """Open prompts, a row each: their pages are held until the host closes them."""

    table: Int[Array, "R prompt_width"]
    length: Int[Array, " R"]  # tokens of the prompt; the cache holds all but the last
    last_token: Int[Array, " R"]


@struct.dataclass
class Requests:
    """The queue: entries [head, end) wait. A request names the prompt's row and the output row it will fill."""

    prompt_row: Int[Array, " Q"]
    output_row: Int[Array, " Q"]
    address: UInt32[Array, "Q 4"]
    key: UInt32[Array, "Q 2"]  # of the address; the window derives it as it begins
    limit: Int[Array, " Q"]  # response tokens at most
    head: Int[Array, ""]
    end: Int[Array, ""]


@struct.dataclass
class Slots:
    """What is being decoded side by side. An inactive slot is masked padding."""

    active: Bool[Array, " S"]
    token: Int[Array, " S"]  # the next input; its key and value are not in the cache yet
    position: Int[Array, " S"]  # of `token` in its sequence
    count: Int[Array, " S"]  # response tokens so far
    limit: Int[Array, " S"]
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
    """Everything that decoding carries from turn to turn, donated to each program and given back."""

    key_pages: Float[Array, "K L*pages page_size H"]
    value_pages: Float[Array, "K L*pages page_size H"]
    pool: PagePool
    prompts: Prompts
    requests: Requests
    slots: Slots
    outputs: Outputs
    seed: Int[Array, ""]
    temperature: Float[Array, ""]
    stop_ids: Int[Array, " stops"]
    busy: Int[Array, ""]  # slot-turns that made a token, and
    turns: Int[Array, ""]  # turns, since the last drain


@struct.dataclass
class Prefix:
    """Keys and values of prompts, contiguous: what prefill gives, and what pages are filled from."""

    keys: Float[Array, "L B T K H"]
    values: Float[Array, "L B T K H"]
    length: Int[Array, " B"]  # tokens of the prompt; 0 for a padding row
    last_token: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Sizes and numbers of an engine; the static ones fix the compiled programs."""

    slots: int
    window: int
    page_size: int
    pages: int
    open_prompts: int
    prefill_rows: int
    max_prompt_tokens: int
    max_response_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    seed: int
    dtype: str
    greedy: bool = False
    attention: str = "jnp"

    @property
    def output_rows(self) -> int:
        """Responses in flight: one for each slot, and as many waiting."""
        return 2 * self.slots

    @property
    def table_width(self) -> int:
        """Pages of the longest prompt with the longest response."""
        return pages_lib.num_pages(self.max_prompt_tokens + self.max_response_tokens, self.page_size)

    @property
    def prompt_width(self) -> int:
        """Pages of the longest prompt."""
        return pages_lib.num_pages(self.max_prompt_tokens, self.page_size)


def empty_state(architecture: Architecture, o: EngineOptions) -> DecodeState:
    """No prompt open, no slot active, every page free."""
    dtype, row = jnp.dtype(o.dtype), dict(dtype=jnp.int32)
    pool = (architecture.num_kv_heads, architecture.num_layers * o.pages, o.page_size, architecture.head_size)
    return DecodeState(
        key_pages=jnp.zeros(pool, dtype),
        value_pages=jnp.zeros(pool, dtype),
        pool=pages_lib.make_pool(o.pages),
        prompts=Prompts(
            table=jnp.zeros((o.open_prompts, o.prompt_width), **row),
            length=jnp.ones(o.open_prompts, **row),
            last_token=jnp.zeros(o.open_prompts, **row),
        ),
        requests=Requests(
            prompt_row=jnp.zeros(o.output_rows, **row),
            output_row=jnp.zeros(o.output_rows, **row),
            address=jnp.zeros((o.output_rows, token_lib.ADDRESS_WORDS), jnp.uint32),
            key=jnp.zeros((o.output_rows, 2), jnp.uint32),
            limit=jnp.zeros(o.output_rows, **row),
            head=jnp.int32(0),
            end=jnp.int32(0),
        ),
        slots=Slots(
            active=jnp.zeros(o.slots, bool),
            token=jnp.zeros(o.slots, **row),
            position=jnp.zeros(o.slots, **row),
            count=jnp.zeros(o.slots, **row),
            limit=jnp.zeros(o.slots, **row),
            key=jnp.zeros((o.slots, 2), jnp.uint32),
            output_row=jnp.zeros(o.slots, **row),
            table=jnp.zeros((o.slots, o.table_width), **row),
            shared=jnp.zeros(o.slots, **row),
            used=jnp.zeros(o.slots, **row),
        ),
        outputs=Outputs(
            tokens=jnp.zeros((o.output_rows, o.max_response_tokens), **row),
            logprobs=jnp.zeros((o.output_rows, o.max_response_tokens), jnp.float32),
            length=jnp.zeros(o.output_rows, **row),
            status=jnp.zeros(o.output_rows, **row),
        ),
        seed=jnp.int32(o.seed),
        temperature=jnp.float32(o.temperature),
        stop_ids=jnp.asarray(o.stop_ids, jnp.int32),
        busy=jnp.int32(0),
        turns=jnp.int32(0),
    )
