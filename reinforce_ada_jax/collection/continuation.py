"""Responses that go on under newer weights than those of their first tokens (`collection.overlap` = in_flight).

At the end of an iteration some responses of later iterations still run. The sampler cuts them, and a later request has
their tokens so far. The sampler computes keys and values of these tokens again, with its present weights. So the
log-probability of every token is that of one policy, the version that drew it, given all tokens before it.
"""

import dataclasses

import numpy as np

from reinforce_ada_jax.types import Request, Response


def following(request: Request) -> Request:
    """Returns the request for the sampler: if its response has begun, the tokens so far are appended to the prompt.

    Such a prompt gets a new id with a line break in it, which no prompt of a data set has.
    """
    if request.begun is None:
        return request
    prompt = request.prompt
    tokens = np.concatenate([prompt.tokens, request.begun.tokens])
    return dataclasses.replace(
        request, prompt=dataclasses.replace(prompt, id=f"{prompt.id}\n{request.draw}", tokens=tokens)
    )


def joined(begun: Response, rest: Response) -> Response:
    """Returns the response whose first tokens are `begun`, with the sampler's answer to the request that follows it."""
    versions = [*(begun.versions or [(begun.policy_version, len(begun.tokens))])]
    if versions[-1][0] == rest.policy_version:
        versions[-1] = (rest.policy_version, versions[-1][1] + len(rest.tokens))
    else:
        versions.append((rest.policy_version, len(rest.tokens)))
    return dataclasses.replace(
        rest,
        prompt_id=begun.prompt_id,
        tokens=np.concatenate([begun.tokens, rest.tokens]),
        logprobs=np.concatenate([begun.logprobs, rest.logprobs]),
        policy_version=begun.policy_version,
        versions=tuple(versions) if len(versions) > 1 else (),
    )
