"""The optimized implementation: what vLLM's scheduler decides, made to be embedded.

    from mustfit_impl import Config, HashedRequest, Scheduler

    scheduler = Scheduler(
        config=Config(
            num_gpu_blocks=300,
            block_size=512,
            max_model_len=131_072,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
        )
    )
    scheduler.add_request(
        HashedRequest(request_id="a", num_prompt_tokens=1000, hash_ids=(7,), max_tokens=100)
    )
    outcome = scheduler.step()
    outcome.num_scheduled_tokens  # {"a": 1000}

``Scheduler.step`` takes one step, ``Scheduler.advance`` as many as are bound to be equal. The
specification in ``mustfit_spec`` is what this is judged by; of it, only the vocabulary is used.
"""

from mustfit_impl.request import HashedRequest, RequestError
from mustfit_impl.run import RunLengthTrace, run, run_in_strides
from mustfit_impl.scheduler import Run, Scheduler, StepOutcome
from mustfit_impl.semantics import NEWEST, REVISIONS, Semantics
from mustfit_spec import Config, ConfigError, NewRequest, SchedulerFailure

__all__ = [
    "NEWEST",
    "REVISIONS",
    "Config",
    "ConfigError",
    "HashedRequest",
    "NewRequest",
    "RequestError",
    "Run",
    "RunLengthTrace",
    "Scheduler",
    "SchedulerFailure",
    "Semantics",
    "StepOutcome",
    "run",
    "run_in_strides",
]
