"""What vLLM says when it starts: is there KV cache for one sequence of ``max_model_len`` tokens?

A script for the Python that has vLLM's dependencies, with a release first on ``PYTHONPATH``::

    PYTHONPATH=<release> python startup_check.py MODEL BLOCK_SIZE MAX_MODEL_LEN [CASE ...]

``MODEL`` is a folder with a ``config.json``. A case is ``MEMORY`` or ``MEMORY/OVERRIDE``: how many
blocks the memory holds, and ``num_gpu_blocks_override``. For each case a line on stdout, in order:
how many blocks the scheduler gets, or why vLLM refuses to start. What is called, and in which
order, is what ``EngineCore`` does with one worker that reports one full-attention layer and no
preference for a layout.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
logging.disable(logging.CRITICAL)


def vllm_config(model: str, block_size: int, max_model_len: int, override: int | None) -> Any:
    """A whole configuration, made by vLLM's own constructors."""
    from vllm.config import (  # noqa: PLC0415 - after the environment is prepared
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    return VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len
        ),
        scheduler_config=SchedulerConfig(max_model_len=max_model_len, is_encoder_decoder=False),
        cache_config=CacheConfig(block_size=block_size, num_gpu_blocks_override=override),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
    )


def num_gpu_blocks(config: Any, memory_blocks: int) -> int:
    """How many blocks vLLM makes of memory for so many.

    Raises:
        ValueError: vLLM refuses to start.
    """
    import torch  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415

    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=1,
        head_size=16,
        dtype=torch.float32,
    )
    specs = [{"layer": spec}]
    try:
        from vllm.v1.attention.backends.utils import (  # noqa: PLC0415
            get_supported_kv_cache_layouts,
            resolve_kv_cache_layout,
        )
    except ImportError:
        pass  # Before 0.29.0 nothing is to be resolved.
    else:
        layouts = [layout.name for layout in get_supported_kv_cache_layouts([])]
        resolve_kv_cache_layout(config, [layouts], [spec])
    memory = [memory_blocks * spec.page_size_bytes]
    try:
        from vllm.v1.core.kv_cache_planning import (  # noqa: PLC0415
            get_global_kv_cache_groups,
            get_kv_cache_configs,
        )
    except ImportError:
        # Before 0.33.0.
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs  # noqa: PLC0415

        made = get_kv_cache_configs(config, specs, memory)
    else:
        groups = get_global_kv_cache_groups(config, specs)
        made = get_kv_cache_configs(config, specs, memory, groups)
    return int(made[0].num_blocks)


def main() -> None:
    """Answers every case."""
    model, block_size, max_model_len, *cases = sys.argv[1:]
    for case in cases:
        memory, _, override = case.partition("/")
        config = vllm_config(
            model, int(block_size), int(max_model_len), int(override) if override else None
        )
        try:
            answer = str(num_gpu_blocks(config, int(memory)))
        except ValueError as refusal:
            answer = f"refused: {' '.join(str(refusal).split())}"
        print(answer, flush=True)  # noqa: T201 - a script


if __name__ == "__main__":
    main()
