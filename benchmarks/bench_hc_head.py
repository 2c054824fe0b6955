"""Benchmark of ``hc_head``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.bench_hc_post_pre import WIDTH, M, make_block, make_parameters
from benchmarks.harness import Work, main
from vllm_dsv4.kernels.hc_head import hc_head


def cases(device: torch.device) -> Iterator[Work]:
    parameters = make_parameters(M, 1, device)
    for num_tokens in (1, 64, 8192):
        streams = make_block(num_tokens, device)[1]
        yield Work(
            f"{num_tokens} tokens x {M} x {WIDTH}",
            lambda streams=streams: hc_head(streams, *parameters, 1e-6, 1e-6),
            bytes=num_tokens * (M + 1) * WIDTH * 2 + parameters[0].nbytes,
        )


if __name__ == "__main__":
    main("hc_head", cases)
