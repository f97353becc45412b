"""The executable specification of vLLM's scheduler when KV cache is short.

Start with ``scheduler.py``: what a step is. ``kv_cache_manager.py`` has the gate and what an
allocation costs, ``block_pool.py`` the free queue and the prefix cache, ``revisions.py`` what later
releases changed. Everything works on the immutable ``State`` of ``state.py``.
"""

from mustfit_spec.config import Config, ConfigError, Policy
from mustfit_spec.revisions import REVISIONS
from mustfit_spec.rules import Rule, rule, rules_of
from mustfit_spec.run import run
from mustfit_spec.scenario import NewRequest, Operation, Scenario, ScenarioError
from mustfit_spec.scheduler import Scheduler, SchedulerFailure, StepOutcome
from mustfit_spec.state import KVCacheBlock, Request, RequestStatus, State, initial_state
from mustfit_spec.trace import (
    PROFILE_FIELDS,
    FinishReason,
    Profile,
    StepTrace,
    Trace,
    TraceError,
    fields_of,
)

__all__ = [
    "PROFILE_FIELDS",
    "REVISIONS",
    "Config",
    "ConfigError",
    "FinishReason",
    "KVCacheBlock",
    "NewRequest",
    "Operation",
    "Policy",
    "Profile",
    "Request",
    "RequestStatus",
    "Rule",
    "Scenario",
    "ScenarioError",
    "Scheduler",
    "SchedulerFailure",
    "State",
    "StepOutcome",
    "StepTrace",
    "Trace",
    "TraceError",
    "fields_of",
    "initial_state",
    "rule",
    "rules_of",
    "run",
]
