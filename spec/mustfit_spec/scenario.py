"""Scenarios: what is done to a scheduler, as plain data. One scenario is one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import attrs

from mustfit_spec.config import Config, at_least


class ScenarioError(ValueError):
    """A scenario that makes no sense, whatever the scheduler."""


def _not_empty(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not value:
        raise ScenarioError(f"{attribute.name} must not be empty")


def not_empty(**given: Any) -> Any:
    """A field whose value must not be empty, which the JSON Schema shows as well."""
    return attrs.field(validator=_not_empty, metadata={"not_empty": True}, **given)


def _tokens(given: Iterable[int]) -> tuple[int, ...]:
    return tuple(given)


@attrs.frozen(kw_only=True)
class NewRequest:
    """A request as it reaches the scheduler, with the tokens that the model is going to sample.

    Attributes:
        request_id: A name that no other request of the scenario has.
        prompt_token_ids: The prompt, at least one token.
        sampled_token_ids: What the model samples, in order, if it is asked: the n-th output token
            is the n-th of these, however often the request is preempted. At least ``max_tokens``.
        max_tokens: Output tokens after which the request ends; 0 stands for all of
            ``sampled_token_ids``.
        min_tokens: Output tokens before which it doesn't end, up to vLLM 0.28.0. From 0.29.0 on
            the scheduler leaves that to the sampler, and this has no effect.
        eos_token_id: An output token that ends it, or ``None``.
        stop_token_ids: Further output tokens that end it.
        priority: Under the priority policy, smaller is served first.
        arrival_time: Breaks ties between equal priorities; earlier is served first.

    Source: vLLM 0.33.0, ``vllm/v1/request.py`` (``Request``) and ``vllm/sampling_params.py``.
    """

    request_id: str = not_empty()
    prompt_token_ids: tuple[int, ...] = not_empty(converter=_tokens)
    sampled_token_ids: tuple[int, ...] = not_empty(converter=_tokens)
    max_tokens: int = at_least(0, default=0)
    min_tokens: int = at_least(0, default=0)
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_tokens)
    priority: int = 0
    arrival_time: int = 0

    @property
    def output_limit(self) -> int:
        """Output tokens after which the request ends (vLLM's ``Request.max_tokens``)."""
        return self.max_tokens or len(self.sampled_token_ids)

    def __attrs_post_init__(self) -> None:
        if self.output_limit > len(self.sampled_token_ids):
            raise ScenarioError(
                f"request {self.request_id!r}: max_tokens ({self.max_tokens}) is more than its "
                f"{len(self.sampled_token_ids)} sampled_token_ids"
            )
        if self.min_tokens > self.output_limit:
            raise ScenarioError(
                f"request {self.request_id!r}: min_tokens ({self.min_tokens}) is more than "
                f"max_tokens ({self.output_limit})"
            )


OperationKind = Literal["add", "step", "abort", "reset_prefix_cache"]


@attrs.frozen(kw_only=True)
class Operation:
    """One thing done to the scheduler.

    Attributes:
        op: ``add`` a request, take a ``step``, ``abort`` a request (one that has ended, or was
            never added, is passed over), or ``reset_prefix_cache``.
        request_id: For ``add`` and ``abort``, whom.
        reset_running_requests: For ``reset_prefix_cache``, whether running requests are preempted
            first; otherwise nothing happens while any block is in use.
    """

    op: OperationKind = attrs.field(
        validator=attrs.validators.in_(("add", "step", "abort", "reset_prefix_cache"))
    )
    request_id: str | None = None
    reset_running_requests: bool = False

    def __attrs_post_init__(self) -> None:
        if (self.request_id is not None) != (self.op in {"add", "abort"}):
            needs = "needs a request_id" if self.request_id is None else "takes no request_id"
            raise ScenarioError(f"the operation {self.op!r} {needs}")
        if self.reset_running_requests and self.op != "reset_prefix_cache":
            raise ScenarioError(f"the operation {self.op!r} takes no reset_running_requests")


@attrs.frozen(kw_only=True)
class Scenario:
    """A configuration, the requests, and what is done, in order.

    Attributes:
        scenario_id: Names the scenario; the trace that answers it repeats the name.
        config: The scheduler's configuration.
        requests: Every request that the operations name.
        operations: What is done. A trace has one entry for each ``step`` among them.

    Raises:
        ScenarioError: Two requests with one id, an operation on a request that isn't there, a
            request that is added twice.
    """

    scenario_id: str
    config: Config
    requests: tuple[NewRequest, ...]
    operations: tuple[Operation, ...]

    @property
    def num_steps(self) -> int:
        """Entries that a whole trace of this scenario has."""
        return sum(operation.op == "step" for operation in self.operations)

    def request(self, request_id: str) -> NewRequest:
        """The request of that name."""
        return next(r for r in self.requests if r.request_id == request_id)

    def __attrs_post_init__(self) -> None:
        known: set[str] = set()
        for request in self.requests:
            if request.request_id in known:
                raise ScenarioError(f"two requests are called {request.request_id!r}")
            known.add(request.request_id)
        added: set[str] = set()
        for index, operation in enumerate(self.operations):
            if operation.request_id is not None and operation.request_id not in known:
                raise ScenarioError(
                    f"operations[{index}] names {operation.request_id!r}, "
                    "which is not among the requests"
                )
            if operation.op == "add":
                if operation.request_id in added:
                    raise ScenarioError(f"operations[{index}] adds {operation.request_id!r} again")
                added.add(str(operation.request_id))
