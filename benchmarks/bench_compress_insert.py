"""Benchmark of ``compress_insert``: each kind of compressor; batches where all tokens, or none, complete a window; a long prompt."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Work, main
from vllm_dsv4.kernels.compress_insert import compress_insert
from vllm_dsv4.quantization.formats import BLOCK_SIZE, STATE_BLOCK_SIZE, CompressorStateFormat, PackedFormat, cache_format


def cases(device: torch.device) -> Iterator[Work]:
    for entry, ratio in ((584, 4), (132, 4), (68, 4), (584, 128)):
        for num_requests, num_tokens, complete in ((1, 1, True), (64, 1, True), (64, 1, False), (1, 8192, True)):
            tokens = f"{num_tokens} tokens of a prompt" if num_tokens > 1 else f"{num_requests} of a batch"
            yield _case(entry, ratio, num_requests, num_tokens, complete, tokens, device)


def _case(entry: int, ratio: int, num_requests: int, num_tokens: int, complete: bool, tokens: str, device: torch.device) -> Work:
    """``num_tokens`` of each request; a single one is the last of its window where ``complete``."""
    fmt = cache_format(torch.uint8, entry)
    assert isinstance(fmt, PackedFormat)
    state = CompressorStateFormat(fmt.head_dim, ratio)
    state_page, page_size = STATE_BLOCK_SIZE[ratio], BLOCK_SIZE // ratio
    first = 0 if num_tokens > 1 else 8 * ratio - 1
    num_blocks = -(-(first + num_tokens) // state_page)
    state_cache = torch.randn(num_requests * num_blocks, state_page, state.row_dim, device=device)
    block_table = torch.randperm(num_requests * num_blocks, device=device).int().view(num_requests, num_blocks)
    token_to_req = torch.arange(num_requests, device=device).int().repeat_interleave(num_tokens)
    positions = torch.arange(first, first + num_tokens, device=device).repeat(num_requests)
    if not complete:
        positions -= 1
    completing = (positions + 1) % ratio == 0
    entries = len(positions) // ratio if num_tokens > 1 else num_requests * complete
    num_pages = entries // page_size + 1
    storage = torch.randint(256, (num_pages, fmt.page_bytes(page_size)), dtype=torch.uint8, device=device)
    cache = storage[:, : page_size * entry].unflatten(1, (page_size, entry))
    slots = torch.where(completing, completing.cumsum(0) - 1, -1)
    weight = torch.randn(fmt.head_dim, device=device).bfloat16()
    cos_sin = torch.randn(first + num_tokens, 64, device=device)
    # An entry reads half of the columns of each of its window's rows at ratio 4, all of them otherwise.
    return Work(
        f"ratio {ratio}, entries of {entry} bytes, {tokens}{'' if complete else ', none complete'}",
        lambda: compress_insert(state_cache, block_table, token_to_req, positions, weight, 1e-6, cos_sin, cache, slots, ratio),
        bytes=entries * (8 * state.window * fmt.head_dim + entry),
    )


if __name__ == "__main__":
    main("compress_insert", cases)
