"""Tensor, expert and data parallelism on the CPU give, token for token, what one rank gives.

The checkpoint is quantised and random, so that the smallest difference in a partial sum would soon change its tokens.
"""

from __future__ import annotations

import random

import pytest
from engine import Batch, free_port, run_engine, start_engine

from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.checkpoint.writer import write_checkpoint

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.slow

OPTIONS = {"max_model_len": 1024, "max_num_batched_tokens": 1024}
NEW_TOKENS = 16


def _prompts() -> list[list[int]]:
    numbers = random.Random(1)
    # 300 tokens cross two ratio-128 windows, and have more entries than the indexer selects.
    return [[numbers.randrange(2, 1000) for _ in range(length)] for length in (300, 17, 130, 64)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config = preset_config("tiny")
    assert config["num_hash_layers"] == 3
    write_checkpoint(folder, config)
    return folder


@pytest.fixture(scope="module")
def one_rank(model):
    """Tokens of every prompt on a single rank."""
    result = run_engine(model, [Batch(_prompts(), NEW_TOKENS)], **OPTIONS)
    return [completion.token_ids for completion in result.batches[0]]


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tp2", "tp2-ep"])
def test_tensor_parallel(model, one_rank, expert_parallel):
    result = run_engine(
        model,
        [Batch(_prompts(), NEW_TOKENS)],
        tensor_parallel_size=2,
        enable_expert_parallel=expert_parallel,
        **OPTIONS,
    )
    assert [completion.token_ids for completion in result.batches[0]] == one_rank


def test_data_parallel_with_an_idle_rank(model, one_rank):
    """The second rank has one short request: it then idles while the first still needs its experts."""
    port = free_port()
    prompts = _prompts()
    shares = [Batch(prompts[:3], NEW_TOKENS), Batch(prompts[3:], 4)]
    ranks = []
    for rank, share in enumerate(shares):
        env = {
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_SIZE": str(len(shares)),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        ranks.append(start_engine(model, [share], env, enable_expert_parallel=True, **OPTIONS))
    first, second = ([completion.token_ids for completion in rank.result().batches[0]] for rank in ranks)
    assert first == one_rank[:3]
    assert second == [one_rank[3][:4]]
