"""Kernels are compiled while the weights load, and on the GPU before the engine reports ready."""

from __future__ import annotations

import os

import torch

from vllm_dsv4.attention.cache import CacheFactory
from vllm_dsv4.backend import select_backend
from vllm_dsv4.compat import VllmConfig, current_platform, get_world_group
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.kernels import _warmup
from vllm_dsv4.kernels._specializations import Shapes, launches

_MAX_WORKERS = 16
"""More processes would mostly import."""


class KernelWarmUp:
    """Begins with ``__init__``, in processes of its own on one rank of a machine; ``finish`` on every rank, once weights are loaded."""

    def __init__(self, config: Dsv4Config, vllm_config: VllmConfig, caches: CacheFactory):
        self.shapes = Shapes(
            config,
            tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
            data_parallel_size=vllm_config.parallel_config.data_parallel_size,
            expert_parallel=vllm_config.parallel_config.enable_expert_parallel,
            dtype=caches.model_dtype,
            kv_dtype=caches.kv_dtype,
            indexer_format=caches.indexer_format,
        )
        device = torch.device(current_platform.device_type)
        self.has_kernels = device.type == "cuda" and select_backend(device).name != "reference"
        self.workers: _warmup.WarmUp | None = None
        if self.has_kernels and get_world_group().local_rank == 0:
            num_workers = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
            self.workers = _warmup.start(self.shapes, torch.cuda.get_device_capability(), num_workers, _num_sms())

    def finish(self) -> None:
        """Load every kernel that a step can meet onto this rank's GPU.

        Raises:
            RuntimeError: a kernel cannot be compiled, or the GPU cannot run it.
        """
        if not self.has_kernels:
            return
        if self.workers is not None:
            self.workers.join()
        # The other ranks take what the workers have left in Triton's cache.
        if get_world_group().world_size > 1:
            get_world_group().barrier()
        _warmup.preload(launches(self.shapes, torch.cuda.get_device_capability(), _num_sms()))


def _num_sms() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
