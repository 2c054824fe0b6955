"""Benchmark of ``token_to_req``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.token_to_req import token_to_req


def cases(device: torch.device) -> Iterator[Work]:
    for num_reqs, length in ((1, 1), (64, 1), (512, 1), (8, 1024)):
        query_start_loc = torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * length
        num_tokens = num_reqs * length
        yield Work(f"{num_reqs} requests x {length}", lambda q=query_start_loc, n=num_tokens: token_to_req(q, n), bytes=4 * num_tokens)


if __name__ == "__main__":
    main("token_to_req", cases)
