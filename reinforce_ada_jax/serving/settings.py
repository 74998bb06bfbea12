"""The options of a server, each declared once: flags, help and checks are made from the record."""

import dataclasses
import math
import os
import re
import socket
from typing import TYPE_CHECKING

from reinforce_ada_jax.config import values
from reinforce_ada_jax.config.paths import check_input, check_local
from reinforce_ada_jax.config.settings import setting
from reinforce_ada_jax.config.values import Allowed

if TYPE_CHECKING:
    import numpy as np

    from reinforce_ada_jax.sampling.state import EngineOptions, SamplingParams


# Flags that only some interfaces have, by their heading in `--help`.
INTERFACES = {
    "Flags of --api=openai": ("replicas", "tensor"),
    "Flags of --api=openai and --api=grpc": ("greedy", "temperature", "top_k", "top_p"),
    "Flags of --api=openai and --api=tinker": ("api_key", "request_mib"),
    "Flags of --api=tinker": ("adapters", "max_rank", "models", "session_s", "sessions", "workdir"),
    "Flags of --api=grpc": ("peer_calls",),
}
LOOPBACK = ("localhost", "127.", "::1")


def _within(least: int, most: int) -> Allowed:
    return Allowed(f"be {least} to {most:,}", lambda value: least <= value <= most)


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Options of a server; each is a flag of the same name."""

    model: str = dataclasses.field(
        metadata={
            "text": "Hugging Face folder, GGUF file, OWNER/MODEL of huggingface.co, or package:cipher. NAME=FOLDER "
            "gives it a name; repeat the flag for several models. Both are not for --api=grpc.",
            "allowed": None,
        }
    )
    api: str = setting(
        "openai",
        "openai: completions and chat over HTTP; tinker: training and sampling for the tinker client; grpc: the "
        "interface of JetStream.",
        values.one_of(("openai", "tinker", "grpc")),
    )  # fmt: skip
    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 is every network of this machine.")
    port: int = setting(9000, "Port to listen on; 0 chooses a free one and prints it.", _within(0, 65_535))
    slots: int = setting(16, "Responses decoded at the same time.", values.MANY)
    replicas: int = setting(
        1,
        "Copies of the model, each with --slots; 0, and over several processes: as many as there are devices. With "
        "--api=openai.",
        values.NOT_NEGATIVE,
    )
    tensor: int = setting(1, "Devices that share a copy of the model, with --api=openai.", values.AT_LEAST_1)
    waiting: int = setting(256, "Requests that may wait for a slot; further ones are refused.", values.NOT_NEGATIVE)
    peer_calls: int = setting(128, "Open calls of one address, with --api=grpc.", values.AT_LEAST_1)
    request_s: float = setting(
        10.0, "Seconds for the headers of a request to arrive, and for its body.",
        Allowed("be above 0 and finite", lambda value: 0 < value < math.inf),
    )  # fmt: skip
    # JetStream's longest bucket is 32,768.
    max_prompt_tokens: int = setting(1024, "Longest prompt; a longer one is refused.", _within(1, 32_768))
    max_response_tokens: int = setting(1024, "Largest max_tokens of a request.", values.TOKENS)
    page_size: int = setting(64, "Tokens in a page of the key/value cache.", values.WINDOW)
    temperature: float = setting(1.0, "Sampling temperature; 0 takes the most probable token.", values.TEMPERATURE)
    top_k: int = setting(0, "Draw among the k most probable tokens; 0 for all.", values.NOT_NEGATIVE)
    top_p: float = setting(1.0, "Draw among the fewest tokens with this probability in sum.", values.SHARE)
    greedy: bool = setting(False, "The same as --temperature=0.")
    dtype: str = setting(
        "auto", "Precision of weights, cache and arithmetic; auto: as model.compute_dtype of a run.",
        values.one_of(("auto", *values.DTYPES)),
    )  # fmt: skip
    seed: int = setting(0, "Seed of all responses, which are numbered as they come.", _within(-(2**31), 2**31 - 1))
    compilation_cache: str = setting(
        "auto", "Folder that keeps compiled programs, as logging.compilation_cache of a run: also gs://; empty: none."
    )
    grace_s: float = setting(
        10.0, "Seconds for running responses to end after the first signal.",
        Allowed("be at least 0", lambda value: 0 <= value <= math.inf),
    )  # fmt: skip

    workdir: str = setting("", "Folder of --api=tinker, for models and checkpoints.")
    api_key: str = setting("", "Key that clients must send, not with --api=grpc; for tinker it begins with tml-.")
    adapters: int = setting(8, "Adapters that --api=tinker samples with at the same time.", values.AT_LEAST_1)
    max_rank: int = setting(32, "Largest rank of adapters of --api=tinker.", values.AT_LEAST_1)
    models: int = setting(16, "Models that --api=tinker has in training; further ones are refused.", values.AT_LEAST_1)
    sessions: int = setting(64, "Sessions of --api=tinker; further ones are refused.", values.AT_LEAST_1)
    session_s: float = setting(
        300.0, "Seconds without a heartbeat after which --api=tinker ends a session.",
        Allowed("be at least 30", lambda value: value >= 30),
    )  # fmt: skip
    request_mib: int = setting(32, "MiB of the largest HTTP request.", _within(1, 1024))

    def check(self) -> None:
        """Raises ValueError with the rule, the value and the remedy."""
        if self.api == "grpc":
            check_input("--model", self.model)
            if re.search("[,=]", self.model) and "://" not in self.model and not os.path.exists(self.model):
                raise ValueError(
                    f"--api=grpc serves one model, without a name, and --model is {self.model!r}: give one folder, or "
                    "choose --api=openai."
                )
            if self.api_key:
                raise ValueError("--api=grpc knows no keys: leave out --api_key, or choose --api=openai.")
        else:
            self._check_http()
        check_input("--compilation_cache", self.compilation_cache)
        values.check_values(self, "--")
        if self.api != "openai" and (self.replicas, self.tensor) != (1, 1):
            raise ValueError(f"--api={self.api} runs on one device: --replicas and --tensor are for --api=openai.")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for heading, names in INTERFACES.items():
            changed = [name for name in names if getattr(self, name) != defaults[name]]
            if changed and f"--api={self.api}" not in heading:
                of = heading.removeprefix("Flags of ")
                raise ValueError(f"--{changed[0]} is a flag of {of}, and --api is {self.api!r}: leave it out.")
        if self.greedy and self.temperature not in (0, 1):
            raise ValueError(
                f"--greedy takes the most probable token, and --temperature={self.temperature} draws: drop one of them."
            )

    def _check_http(self) -> None:
        tinker = self.api == "tinker"
        if tinker and not self.workdir:
            raise ValueError("--api=tinker needs --workdir=DIR, where models and checkpoints are kept.")
        if tinker:
            check_local("--workdir", self.workdir)
        for folder in self.model_folders().values():
            check_local("--model", folder)
        if tinker and self.api_key and not self.api_key.startswith("tml-"):
            raise ValueError("--api_key must begin with tml-: the client refuses other keys.")
        if not (self.api_key.isascii() and self.api_key.isprintable()) or " " in self.api_key:
            raise ValueError("--api_key must be printable ASCII without spaces: it is sent in a header.")
        if not self.is_loopback and not self.api_key:
            raise ValueError(
                f"--host={self.host} lets other machines in, and there is no --api_key: set one"
                f"{' that begins with tml-' * tinker}."
            )

    def model_folders(self) -> dict[str, str]:
        """Returns {name: folder} of the models of an HTTP server; a folder without NAME= is its own name."""
        found: dict[str, str] = {}
        for entry in self.model.split(","):
            name, _, folder = entry.partition("=") if "=" in entry else (entry, "", entry)
            if not name or not folder or name in found:
                raise ValueError(
                    f"--model={self.model} must be folders, or NAME=FOLDER, with different names and commas between "
                    "them."
                )
            found[name] = folder
        return found

    @property
    def is_loopback(self) -> bool:
        return self.host.startswith(LOOPBACK)

    @property
    def sampling(self) -> "SamplingParams":
        """Sampling parameters of every response."""
        from reinforce_ada_jax.sampling.state import SamplingParams  # noqa: PLC0415  (--help needs no JAX)

        temperature = 0.0 if self.greedy else self.temperature
        return SamplingParams(self.max_response_tokens, temperature, self.top_k, self.top_p)

    @property
    def address(self) -> str:
        """The host as gRPC writes it: an IPv6 address is in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host


def check_max_tokens(max_tokens: int, options: "EngineOptions") -> None:
    if not 1 <= max_tokens <= options.max_response_tokens:
        raise ValueError(
            f"max_tokens is {max_tokens}; it must be 1 to {options.max_response_tokens:,}. For longer responses start "
            "the server with a larger --max_response_tokens."
        )


def check_prompt(tokens: "np.ndarray", options: "EngineOptions", vocab_size: int) -> None:
    if not 1 <= len(tokens) <= options.max_prompt_tokens:
        raise ValueError(
            f"the prompt has {len(tokens):,} tokens, this server takes 1 to {options.max_prompt_tokens:,}: send a "
            "shorter one, or start the server with a larger --max_prompt_tokens."
        )
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise ValueError(f"token id {outside[0]} is outside of the vocabulary, 0 to {vocab_size - 1:,}.")


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket with this address; ValueError if nothing can listen there."""
    found = None
    try:
        family, kind, _, _, address = min(  # IPv4 where there is a choice
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        )
        found = socket.socket(family, kind)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        if found is not None:
            found.close()
        raise ValueError(
            f"cannot listen on {host}, port {port} ({error.strerror}): choose another --host or --port."
        ) from error
    return found
