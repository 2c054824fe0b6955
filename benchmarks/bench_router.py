"""Benchmark of ``router``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.router import router

VOCAB = 129280


def cases(device: torch.device) -> Iterator[Work]:
    for num_experts in (256, 384):
        bias = torch.randn(num_experts, device=device)
        for num_tokens in (1, 8, 64, 8192):
            logits = torch.randn(num_tokens, num_experts, device=device)
            run = lambda logits=logits, bias=bias: router(logits, 6, 1.5, bias=bias)  # noqa: E731
            yield Work(f"{num_tokens} tokens, top 6 of {num_experts}", run, bytes=logits.nbytes + num_tokens * 48)
    table = torch.randint(0, 256, (VOCAB, 6), dtype=torch.int32, device=device)
    for num_tokens in (1, 64, 8192):
        logits = torch.randn(num_tokens, 256, device=device)
        ids = torch.randint(0, VOCAB, (num_tokens,), device=device)
        run = lambda logits=logits, ids=ids: router(logits, 6, 1.5, tid2eid=table, input_ids=ids)  # noqa: E731
        yield Work(f"{num_tokens} tokens, by token id", run, bytes=num_tokens * (6 * 32 + 24 + 48))


if __name__ == "__main__":
    main("router", cases)
