"""Benchmark of ``hc_post``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.bench_hc_post_pre import WIDTH, M, make_block
from benchmarks.harness import Work, main
from vllm_dsv4.kernels.hc_post import hc_post


def cases(device: torch.device) -> Iterator[Work]:
    for num_tokens in (1, 64, 8192):
        block = make_block(num_tokens, device)
        yield Work(f"{num_tokens} tokens x {M} x {WIDTH}", lambda block=block: hc_post(*block), bytes=num_tokens * (2 * M + 1) * WIDTH * 2)


if __name__ == "__main__":
    main("hc_post", cases)
