"""Kernels are compiled while the weights load, and on the GPU before the engine reports ready."""

from __future__ import annotations

import os

import torch

from vllm_dsv4.attention.cache import CacheFactory
from vllm_dsv4.backend import select_backend
from vllm_dsv4.compat import VllmConfig, current_platform, get_world_group
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.kernels import _launch, _warmup
from vllm_dsv4.kernels._launch import Capability
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
        self.gpu = _gpu_with_kernels()
        self.workers: _warmup.WarmUp | None = None
        if self.gpu is not None and get_world_group().local_rank == 0:
            capability, num_sms = self.gpu
            num_workers = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
            self.workers = _warmup.start(self.shapes, capability, num_workers, num_sms)

    def finish(self) -> None:
        """Load every kernel that a step can meet onto this rank's GPU.

        Raises:
            RuntimeError: a kernel cannot be compiled, or the GPU cannot run it.
        """
        if self.gpu is None:
            return
        if self.workers is not None:
            self.workers.join()
        # The other ranks take what the workers have left in Triton's cache.
        world = get_world_group()
        if world.world_size > 1:
            world.barrier()
        _warmup.preload(launches(self.shapes, *self.gpu))


def _gpu_with_kernels() -> tuple[Capability, int] | None:
    """Capability and number of multiprocessors of this rank's GPU; None where the reference ops run."""
    if current_platform.device_type != "cuda":
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return None if select_backend(device).name == "reference" else (_launch.capability(device), _launch.num_sms(device))
