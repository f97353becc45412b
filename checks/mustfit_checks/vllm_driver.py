"""Runs scenarios on vLLM's own V1 scheduler: a scenario a line in, a trace a line out.

A script for a Python that has vLLM's dependencies and nothing of mustfit's, with the folder that
holds the ``vllm`` package first on ``PYTHONPATH``::

    PYTHONPATH=<unpacked release> python vllm_driver.py <scenarios.jsonl >traces.jsonl

The scheduler, the KV cache manager, the requests and the configuration are vLLM's, as they are: no
part is replaced or patched. Only the model is missing; the n-th token that it would sample is the
n-th of a request's ``sampled_token_ids``. Scheduling is synchronous.

After each step the block pool is checked for consistency; a violation is reported like a crash, as
the error ``InvariantViolation``. So is, as ``Unsupported``, an option that the release does not
have.

Environment:
    MUSTFIT_VLLM_RELEASE: The release to name in the traces, instead of the one found.
    VLLM_CACHE_ROOT: Where vLLM keeps what it learns about the model between runs. Without it every
        start takes seconds longer.

Exit status: 0 at the end of the input; 2, with one line on stderr, for input that is no scenario, a
vLLM that cannot be imported, or a Python that skips assertions (``-O``, ``PYTHONOPTIMIZE``). Works
with vLLM 0.21.0 to 0.33.0.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import json
import linecache
import logging
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request

MESSAGE_LIMIT = 300
CONFIGS_KEPT = 1024

# A made-up model: the scheduler asks its configuration whether it is multimodal and the like.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

# Queues for requests that wait for something other than KV blocks (which of them: by release).
OUT_OF_SCOPE_QUEUES = ("skipped_waiting", "kv_holding_waiting", "deferred_waiting")


class InputError(ValueError):
    """A line of the input that is no scenario."""


class UnsupportedError(Exception):
    """A configuration that this release has no option for."""


class InvariantViolation(Exception):
    """A state of the block pool or of the queues that contradicts itself."""


@dataclasses.dataclass(frozen=True)
class Field:
    """One key of a JSON object: the types it may have, and its default if it may be missing."""

    types: tuple[type, ...]
    default: object = ...


_NONE = type(None)

CONFIG_FIELDS = {
    "num_gpu_blocks": Field((int,)),
    "block_size": Field((int,)),
    "max_model_len": Field((int,)),
    "max_num_seqs": Field((int,)),
    "max_num_batched_tokens": Field((int,)),
    "max_num_scheduled_tokens": Field((int, _NONE), None),
    "max_num_active_seqs": Field((int, _NONE), None),
    "enable_chunked_prefill": Field((bool,), default=True),
    "enable_prefix_caching": Field((bool,), default=True),
    "long_prefill_token_threshold": Field((int,), 0),
    "long_prefill_token_threshold_adaptive": Field((bool,), default=False),
    "policy": Field((str,), "fcfs"),
    "scheduler_reserve_full_isl": Field((bool,), default=True),
    "watermark": Field((float, int), 0.0),
    "num_lookahead_tokens": Field((int,), 0),
}
REQUEST_FIELDS = {
    "request_id": Field((str,)),
    "prompt_token_ids": Field((list,)),
    "sampled_token_ids": Field((list,)),
    "max_tokens": Field((int,), 0),
    "min_tokens": Field((int,), 0),
    "eos_token_id": Field((int, _NONE), None),
    "stop_token_ids": Field((list,), ()),
    "priority": Field((int,), 0),
    "arrival_time": Field((int,), 0),
}
OPERATION_FIELDS = {
    "op": Field((str,)),
    "request_id": Field((str, _NONE), None),
    "reset_running_requests": Field((bool,), default=False),
}
SCENARIO_FIELDS = {
    "scenario_id": Field((str,)),
    "config": Field((dict,)),
    "requests": Field((list,)),
    "operations": Field((list,)),
}

# Of the configuration, what SchedulerConfig takes, under the same names.
SCHEDULER_OPTIONS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "policy",
    "scheduler_reserve_full_isl",
    "watermark",
)
TOKEN_LISTS = ("prompt_token_ids", "sampled_token_ids", "stop_token_ids")


def read_object(value: object, fields: Mapping[str, Field], where: str) -> dict[str, Any]:
    """Checks a JSON object's keys and types, and fills in defaults.

    Raises:
        InputError: It is no object, lacks a key, has one too many, or one of the wrong type.
    """
    if not isinstance(value, dict):
        raise InputError(f"{where} is not an object")
    if unknown := value.keys() - fields.keys():
        raise InputError(f"{where} has the unknown key {min(unknown)!r}")
    whole = {}
    for name, field in fields.items():
        item = value.get(name, field.default)
        if item is ...:
            raise InputError(f"{where} lacks {name!r}")
        # bool is a subclass of int, and true is no number of blocks.
        if name in value and (
            not isinstance(item, field.types)
            or (isinstance(item, bool) and bool not in field.types)
        ):
            raise InputError(f"{where}: {name!r} must not be {json.dumps(item)[:40]}")
        whole[name] = item
    return whole


def read_scenario(line: str) -> dict[str, Any]:
    """Decodes one line of the input.

    Raises:
        InputError: The line is no scenario.
    """
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise InputError(f"not JSON: {error}") from error
    scenario = read_object(raw, SCENARIO_FIELDS, "the scenario")
    scenario["config"] = read_object(scenario["config"], CONFIG_FIELDS, "config")
    requests: dict[str, dict[str, Any]] = {}
    for index, item in enumerate(scenario["requests"]):
        where = f"requests[{index}]"
        request = read_object(item, REQUEST_FIELDS, where)
        for name in TOKEN_LISTS:
            if any(type(token) is not int for token in request[name]):
                raise InputError(f"{where}: {name!r} must be a list of integers")
        if request["request_id"] in requests:
            raise InputError(f"{where}: {request['request_id']!r} is there already")
        requests[request["request_id"]] = request
    scenario["requests"] = requests
    operations = []
    for index, item in enumerate(scenario["operations"]):
        where = f"operations[{index}]"
        operation = read_object(item, OPERATION_FIELDS, where)
        if operation["op"] not in {"add", "step", "abort", "reset_prefix_cache"}:
            raise InputError(f"{where}: there is no operation {operation['op']!r}")
        if operation["op"] in {"add", "abort"} and operation["request_id"] not in requests:
            raise InputError(f"{where} names a request that is not among the requests")
        operations.append(operation)
    scenario["operations"] = operations
    return scenario


class Factory:
    """Builds vLLM's objects; the configuration of the model, which takes seconds, only once.

    Attributes:
        release: The release, as vLLM itself or its metadata names it; ``None`` if neither does.
    """

    def __init__(self, model_folder: str) -> None:
        # Here and not above, because what vLLM prints while it is imported must not reach stdout.
        import torch  # noqa: PLC0415
        import vllm  # noqa: PLC0415
        from vllm.config import (  # noqa: PLC0415
            CacheConfig,
            DeviceConfig,
            ModelConfig,
            ParallelConfig,
            SchedulerConfig,
            VllmConfig,
        )
        from vllm.sampling_params import SamplingParams  # noqa: PLC0415
        from vllm.utils.hashing import sha256  # noqa: PLC0415
        from vllm.v1.core.kv_cache_utils import (  # noqa: PLC0415
            get_request_block_hasher,
            init_none_hash,
        )
        from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
        from vllm.v1.kv_cache_interface import (  # noqa: PLC0415
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )
        from vllm.v1.outputs import ModelRunnerOutput  # noqa: PLC0415
        from vllm.v1.request import Request, RequestStatus  # noqa: PLC0415
        from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415

        self.release = find_release(Path(vllm.__file__).parent)
        self._cache_config = CacheConfig
        self._scheduler_config = SchedulerConfig
        self._scheduler_options = {field.name for field in dataclasses.fields(SchedulerConfig)}
        self._sampling_params = SamplingParams
        self._scheduler = Scheduler
        self._request = Request
        self._kv_cache_config = KVCacheConfig
        self._kv_cache_group_spec = KVCacheGroupSpec
        self._full_attention_spec = FullAttentionSpec
        self._dtype = torch.float32
        self._sha256 = sha256
        self._get_request_block_hasher = get_request_block_hasher
        self.model_runner_output = ModelRunnerOutput
        self.aborted = RequestStatus.FINISHED_ABORTED

        init_none_hash(sha256)
        self._hashers: dict[int, Callable[[Request], Any]] = {}
        self._configs: dict[tuple[object, ...], VllmConfig] = {}
        cache_config = CacheConfig(block_size=16, enable_prefix_caching=True)
        cache_config.num_gpu_blocks = 16
        self._base = VllmConfig(
            model_config=ModelConfig(
                model=model_folder, skip_tokenizer_init=True, dtype="float32", max_model_len=64
            ),
            scheduler_config=SchedulerConfig(
                max_model_len=64, is_encoder_decoder=False, async_scheduling=False
            ),
            cache_config=cache_config,
            device_config=DeviceConfig("cpu"),
            parallel_config=ParallelConfig(),
        )
        # Structured output is out of scope: this one is handed to every scheduler, and not used.
        self._structured_output_manager = StructuredOutputManager(self._base)

    def _vllm_config(self, config: dict[str, Any]) -> VllmConfig:
        key = tuple(config.values())
        if (kept := self._configs.get(key)) is not None:
            return kept
        options = {}
        for name in SCHEDULER_OPTIONS:
            if name in self._scheduler_options:
                options[name] = config[name]
            elif config[name] != CONFIG_FIELDS[name].default:
                raise UnsupportedError(f"vLLM {self.release or 'of this tree'} has no {name}")
        # These constructors validate, as they do in production. The rest of a VllmConfig does not
        # depend on the scenario, so it is shared.
        cache_config = self._cache_config(
            block_size=config["block_size"], enable_prefix_caching=config["enable_prefix_caching"]
        )
        cache_config.num_gpu_blocks = config["num_gpu_blocks"]
        model_config = copy.copy(self._base.model_config)
        model_config.max_model_len = config["max_model_len"]
        vllm_config = copy.copy(self._base)
        vllm_config.model_config = model_config
        vllm_config.cache_config = cache_config
        vllm_config.scheduler_config = self._scheduler_config(
            max_model_len=config["max_model_len"],
            is_encoder_decoder=False,
            async_scheduling=False,
            **options,
        )
        if len(self._configs) >= CONFIGS_KEPT:
            self._configs.clear()
        self._configs[key] = vllm_config
        return vllm_config

    def scheduler(self, config: dict[str, Any]) -> Scheduler:
        """A new scheduler.

        Raises:
            UnsupportedError: The release has no such option.
            Exception: Whatever vLLM raises for a configuration that it refuses.
        """
        block_size = config["block_size"]
        spec = self._full_attention_spec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=self._dtype
        )
        scheduler = self._scheduler(
            vllm_config=self._vllm_config(config),
            kv_cache_config=self._kv_cache_config(
                config["num_gpu_blocks"], [], [self._kv_cache_group_spec(["layer"], spec)]
            ),
            structured_output_manager=self._structured_output_manager,
            block_size=block_size,
            hash_block_size=block_size,
            log_stats=False,
        )
        if config["num_lookahead_tokens"]:
            # vLLM derives this from a speculative decoding configuration, which would need a second
            # model. With no drafts, the attribute is read only where slots are allocated; what else
            # depends on it (skipping drafts, reserving blocks for KV transfers) is out of scope.
            scheduler.num_lookahead_tokens = config["num_lookahead_tokens"]
        return scheduler

    def _params(self, request: dict[str, Any]) -> SamplingParams:
        params = self._sampling_params(
            max_tokens=request["max_tokens"] or len(request["sampled_token_ids"]),
            min_tokens=request["min_tokens"],
            stop_token_ids=list(request["stop_token_ids"]),
        )
        params.update_from_generation_config({}, request["eos_token_id"])
        return params

    def request(self, request: dict[str, Any], config: dict[str, Any]) -> Request:
        """A new request, its block hashes computed if the configuration caches prefixes."""
        block_hasher = None
        if config["enable_prefix_caching"]:
            block_size = config["block_size"]
            block_hasher = self._hashers.get(block_size)
            if block_hasher is None:
                block_hasher = self._get_request_block_hasher(block_size, self._sha256)
                self._hashers[block_size] = block_hasher
        return self._request(
            request_id=request["request_id"],
            prompt_token_ids=list(request["prompt_token_ids"]),
            sampling_params=self._params(request),
            pooling_params=None,
            arrival_time=request["arrival_time"],
            priority=request["priority"],
            block_hasher=block_hasher,
        )


class Run:
    """One scenario on one scheduler.

    Attributes:
        steps: What was observed so far, an entry for each whole step.
    """

    def __init__(self, factory: Factory, scenario: dict[str, Any]) -> None:
        self._factory = factory
        self._config = scenario["config"]
        self._requests = scenario["requests"]
        self._operations = scenario["operations"]
        self.steps: list[dict[str, Any]] = []

    def run(self) -> None:
        """Does what the scenario says, and appends to ``steps``.

        Raises:
            UnsupportedError: The release has no such option.
            InvariantViolation: The scheduler's state contradicts itself.
            Exception: Whatever vLLM raises.
        """
        scheduler = self._factory.scheduler(self._config)
        for operation in self._operations:
            kind = operation["op"]
            if kind == "step":
                self.steps.append(self._step(scheduler))
            elif kind == "add":
                request = self._requests[operation["request_id"]]
                scheduler.add_request(self._factory.request(request, self._config))
            elif kind == "abort":
                scheduler.finish_requests(operation["request_id"], self._factory.aborted)
            else:
                scheduler.reset_prefix_cache(
                    reset_running_requests=operation["reset_running_requests"]
                )

    def _step(self, scheduler: Scheduler) -> dict[str, Any]:
        preemptions = {request: request.num_preemptions for request in scheduler.running}
        output = scheduler.schedule()
        num_scheduled_tokens = dict(output.num_scheduled_tokens)
        # Counted rather than read from the output, which in some releases names those as well that
        # a reset of the prefix cache preempted before.
        preempted = [
            request for request, before in preemptions.items() if request.num_preemptions > before
        ]
        stayed = preemptions.keys() - set(preempted)
        num_cached_tokens = {
            request.request_id: (
                request.num_computed_tokens - num_scheduled_tokens.get(request.request_id, 0)
            )
            for request in scheduler.running
            if request not in stayed
        }
        known = set(scheduler.requests)
        finish_reasons = self._update(scheduler, output)
        if known - scheduler.requests.keys() != finish_reasons.keys():
            raise InvariantViolation("requests left without a word that they finished")
        for name in OUT_OF_SCOPE_QUEUES:
            if getattr(scheduler, name, None):
                raise InvariantViolation(f"a request is in {name}, for reasons out of scope")
        running = [request.request_id for request in scheduler.running]
        tables, free, cached = observe_blocks(scheduler)
        block_ids = {request_id: tables.get(request_id, []) for request_id in running}
        return {
            "num_scheduled_tokens": num_scheduled_tokens,
            "preempted": [request.request_id for request in preempted],
            "finished": list(finish_reasons),
            "running": running,
            "waiting": [request.request_id for request in scheduler.waiting],
            "num_free_blocks": len(free),
            "num_cached_tokens": num_cached_tokens,
            "num_blocks": {request_id: len(ids) for request_id, ids in block_ids.items()},
            "finish_reasons": finish_reasons,
            "block_ids": block_ids,
            "free_block_ids": free,
            "cached_block_ids": cached,
        }

    def _update(self, scheduler: Scheduler, output: SchedulerOutput) -> dict[str, str]:
        """Feeds the model's output back; returns who finished, and why."""
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = scheduler.requests[request_id]
            tokens = []
            if request.num_computed_tokens >= request.num_tokens:
                index = request.num_output_tokens
                known = self._requests[request_id]["sampled_token_ids"]
                if index >= len(known):
                    raise InvariantViolation(f"{request_id!r} goes on after its last output token")
                tokens.append(known[index])
            sampled.append(tokens)
        outputs: Mapping[int, EngineCoreOutputs] = scheduler.update_from_output(
            output,
            self._factory.model_runner_output(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        return {
            one.request_id: str(one.finish_reason)
            for client in outputs.values()
            for one in client.outputs
            if one.finish_reason is not None
        }


def observe_blocks(
    scheduler: Scheduler,
) -> tuple[dict[str, list[int]], list[int], list[list[int]]]:
    """Reads the block pool, and checks that it is consistent.

    Returns:
        The block ids that each request holds, the free ones in the order in which they are handed
        out, and the cached ones as in ``StepTrace.cached_block_ids``.

    Raises:
        InvariantViolation: It is not consistent.
    """
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    blocks = pool.blocks
    (single,) = manager.coordinator.single_type_managers
    tables = {
        request_id: [block.block_id for block in held]
        for request_id, held in single.req_to_blocks.items()
    }
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]

    holders = [0] * len(blocks)
    for block_id in itertools.chain.from_iterable(tables.values()):
        holders[block_id] += 1
    null = pool.null_block.block_id
    if holders[null]:
        raise InvariantViolation("a request holds the null block")
    holders[null] = blocks[null].ref_cnt  # vLLM does not maintain it.
    if [block.ref_cnt for block in blocks] != holders:
        wrong = next(block for block in blocks if block.ref_cnt != holders[block.block_id])
        raise InvariantViolation(
            f"block {wrong.block_id} counts {wrong.ref_cnt} references, "
            f"{holders[wrong.block_id]} requests hold it"
        )
    holders[null] = 1  # It is never free.
    if sorted(free) != [block_id for block_id, count in enumerate(holders) if not count]:
        raise InvariantViolation("the free queue is not the blocks that nobody holds")
    if pool.get_num_free_blocks() != len(free):
        raise InvariantViolation(
            f"{pool.get_num_free_blocks()} blocks counted as free, {len(free)} in the free queue"
        )

    cached = []
    hashed = 0
    for block_hash, value in pool.cached_block_hash_to_block._cache.items():  # noqa: SLF001
        ids = list(value) if isinstance(value, dict) else [value.block_id]
        for block_id in ids:
            if blocks[block_id].block_hash != block_hash:
                raise InvariantViolation(f"block {block_id} is cached under a hash not its own")
        hashed += len(ids)
        cached.append(ids)
    if hashed != sum(block.block_hash is not None for block in blocks):
        raise InvariantViolation("a block that carries a hash is not in the prefix cache")
    cached.sort()
    return tables, free, cached


def find_release(package: Path) -> str | None:
    """The release of the ``vllm`` package in that folder, or ``None`` if nothing names it."""
    if named := os.environ.get("MUSTFIT_VLLM_RELEASE"):
        return named
    for metadata in package.parent.glob("vllm-*.dist-info/METADATA"):
        for line in metadata.read_text(encoding="utf-8").splitlines():
            if line.startswith("Version:"):
                return line.partition(":")[2].strip()
    try:
        from vllm._version import __version__  # noqa: PLC0415
    except ImportError:
        return None
    return str(__version__)


def describe(error: Exception) -> str:
    """An exception in one line: what it says, and the place in vLLM that raised it."""
    message = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return message[:MESSAGE_LIMIT]
    inside = [frame for frame in frames if "/vllm/" in frame.filename.replace(os.sep, "/")]
    frame = (inside or frames)[-1]
    name = frame.filename.replace(os.sep, "/")
    name = "vllm/" + name.rpartition("/vllm/")[2] if inside else name.rpartition("/")[2]
    if not message and frame.lineno is not None:
        # Most assertions of vLLM's say nothing but themselves.
        message = linecache.getline(frame.filename, frame.lineno).strip()
    place = f" ({name}:{frame.lineno})"
    return message[: MESSAGE_LIMIT - len(place)] + place


def answer(factory: Factory, scenario: dict[str, Any]) -> dict[str, Any]:
    """Runs one scenario on a new scheduler; returns its trace."""
    run = Run(factory, scenario)
    error = None
    try:
        run.run()
    except UnsupportedError as unsupported:
        error = {"step": 0, "kind": "Unsupported", "message": str(unsupported)}
    except InvariantViolation as violation:
        message = str(violation)[:MESSAGE_LIMIT]
        error = {"step": len(run.steps), "kind": "InvariantViolation", "message": message}
    except Exception as failure:  # noqa: BLE001 - whatever it is, it is what the scheduler did
        kind = type(failure).__name__
        error = {"step": len(run.steps), "kind": kind, "message": describe(failure)}
    return {
        "scenario_id": scenario["scenario_id"],
        "steps": run.steps,
        "error": error,
        "release": factory.release,
    }


def fail(message: str) -> NoReturn:
    """Ends the program with status 2 and one line on stderr."""
    sys.stderr.write(f"{Path(sys.argv[0]).stem}: {' '.join(message.split())}\n")
    sys.stderr.flush()
    # Not sys.exit: threads that vLLM started must not delay the end, nor say anything.
    os._exit(2)


def serve(factory: Factory, scenarios: TextIO, traces: TextIO) -> None:
    """Answers every line, in order.

    Raises:
        InputError: A line is no scenario.
    """
    for number, line in enumerate(scenarios, start=1):
        if not line.strip():
            continue
        try:
            scenario = read_scenario(line)
        except InputError as error:
            raise InputError(f"line {number}: {error}") from error
        trace = answer(factory, scenario)
        traces.write(json.dumps(trace, separators=(",", ":")) + "\n")
        traces.flush()


def leave_own_folder() -> None:
    """Takes the script's folder off the module path, where Python puts it first.

    Its modules must not pass for vLLM's dependencies.
    """
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    os.environ["PYTHONSAFEPATH"] = "1"


def take_streams() -> tuple[TextIO, TextIO]:
    """Stdin and stdout on descriptors of their own, for the protocol alone.

    Whatever a library, or a process that it starts, prints or reads goes elsewhere.
    """
    stdin = os.fdopen(os.dup(0), encoding="utf-8")
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return stdin, stdout


def prepare() -> tuple[TextIO, TextIO]:
    """Makes this process fit for vLLM, which must not be imported yet; returns its streams."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not __debug__:
        # vLLM's own assertions are part of what it does.
        fail("Python skips assertions, and vLLM's matter; run it without -O and PYTHONOPTIMIZE")
    leave_own_folder()
    streams = take_streams()
    # A user's own settings for vLLM must not change what is measured.
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        if name != "VLLM_CACHE_ROOT":
            del os.environ[name]
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }
    # Before vLLM configures its own loggers, some of its messages pass any level.
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    return streams


def start_vllm() -> Factory:
    """Imports vLLM, in a process that is prepared; ends it if that fails."""
    with tempfile.TemporaryDirectory(prefix="mustfit-vllm-") as folder:
        os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(folder, "cache")))
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        factory: Factory | None = None
        failure = ""
        try:
            factory = Factory(folder)
        except Exception as error:  # noqa: BLE001 - an unfit tree can fail in any way
            failure = f"{type(error).__name__}: {describe(error)}"
    if factory is None:
        fail(f"cannot set vLLM up: {failure}")
    # What is there by now stays, so the collector need not look at it again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    return factory


def main() -> None:
    """Reads scenarios from stdin and writes traces to stdout, until the end of the input."""
    scenarios, traces = prepare()
    factory = start_vllm()
    try:
        serve(factory, scenarios, traces)
    except InputError as error:
        fail(str(error))
    except BrokenPipeError:
        fail("nobody reads the traces any more")
    os._exit(0)


if __name__ == "__main__":
    main()
