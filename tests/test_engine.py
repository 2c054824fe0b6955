"""The served model, through ``vllm.LLM``, against transformers in float32 (model.md 8): log-probabilities and greedy tokens.

However the engine schedules a request, its numbers must be those of one pass over the whole sequence: in one step or in
chunks, beside others, after a prefix hit, after a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine import Batch, Completion, run_engine
from oracle import NAMED_CONFIGS, hf_log_probs, load_hf, random_config, random_prompt, write_oracle_checkpoint

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # the bar; float32 in transformers against float64 in ours differ by some 1e-5
SHARED_PREFIX = 512  # two blocks of 256 tokens, the unit of prefix caching
REMAINDERS = (1, 2, 3, 5, 127, 128, 129, 257)
CONFIGS = {**{name: make() for name, make in NAMED_CONFIGS.items()}, **{f"random_{seed}": random_config(seed) for seed in (1, 2)}}


@dataclass(frozen=True)
class Served:
    folder: Path
    hf: Any
    vocab_size: int

    def run(self, batches: list[Batch], **options: Any):
        return run_engine(self.folder, batches, dtype="float32", **{"max_model_len": 1024, **options})

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        return random_prompt(self.vocab_size, length, seed)

    def check(self, prompt: list[int], completion: Completion) -> None:
        """Compare with one pass of transformers over prompt and completion; greedy tokens must be its likeliest at each step."""
        sequence = prompt + completion.token_ids
        expected = hf_log_probs(self.hf, sequence)
        for position, value in enumerate(completion.prompt_logprobs):
            reference = expected[position, prompt[position + 1]].item()
            assert abs(value - reference) <= TOLERANCE, f"prompt token {position + 1}: {value} against {reference}"
        for step, (token, logprobs) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            row = expected[len(prompt) - 1 + step]
            assert row.argmax().item() == token, f"generated token {step}: {token}, top two {row.topk(2)}"
            worst = max(abs(value - row[other].item()) for other, value in logprobs.items())
            assert worst <= TOLERANCE, f"generated token {step}: log-probabilities differ by {worst}"


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """``serve(name)`` writes a configuration's checkpoint once and loads it with transformers."""
    made: dict[str, Served] = {}

    def make(name: str) -> Served:
        if name not in made:
            config = CONFIGS[name]
            folder = write_oracle_checkpoint(tmp_path_factory.mktemp(name), config)
            made[name] = Served(folder, load_hf(folder), config["vocab_size"])
        return made[name]

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_prompt_and_mixed_batch(serve, name):
    """A prompt of 300 tokens in one step and 200 tokens after it; then eight requests of different lengths at once."""
    model = serve(name)
    alone = model.prompt(300)
    beside = [model.prompt(length, seed=length) for length in (1, 2, 3, 4, 63, 129, 200, 515)]
    result = model.run([Batch([alone], 200, prompt_logprobs=True), Batch(beside, 20)], max_num_batched_tokens=1024)
    model.check(alone, result.batches[0][0])
    for prompt, completion in zip(beside, result.batches[1], strict=True):
        model.check(prompt, completion)


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_and_prefix_hits(serve, name):
    """Steps of at most 64 tokens; then prompts of which all but a few tokens are found in the prefix cache."""
    model = serve(name)
    alone = model.prompt(300)
    prefix = model.prompt(SHARED_PREFIX, seed=1)
    hits = [prefix + model.prompt(remainder, seed=10 + remainder) for remainder in REMAINDERS]
    result = model.run(
        [Batch([alone], 200, prompt_logprobs=True), Batch([prefix + model.prompt(8, seed=2)], 1), Batch(hits, 4)],
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )
    model.check(alone, result.batches[0][0])
    for prompt, completion in zip(hits, result.batches[2], strict=True):
        assert completion.num_cached_tokens == SHARED_PREFIX
        model.check(prompt, completion)


@pytest.mark.parametrize("name", ["flash_like", "pro_like"])
def test_preemption(serve, name):
    """Requests that all fit when they start, and outgrow the KV cache: some are preempted, and computed again."""
    model = serve(name)
    prompts = [model.prompt(length, seed=length) for length in range(20, 28)]
    result = model.run([Batch(prompts, 200)], max_model_len=320, max_num_batched_tokens=64, num_gpu_blocks_override=112)
    assert result.metrics["vllm:num_preemptions"] > 0
    for prompt, completion in zip(prompts, result.batches[0], strict=True):
        model.check(prompt, completion)


def test_conversation_with_itself(serve):
    """Turns that each extend the last one's text: every prefix hit ends inside text that the engine generated."""
    model = serve("flash_like")
    first = model.prompt(200, seed=3)
    # Greedy text is known from transformers only step by step, so the turns' texts come from a first engine.
    answer = model.run([Batch([first], 120)], max_num_batched_tokens=1024).batches[0][0]
    second = first + answer.token_ids + model.prompt(40, seed=4)
    # By default vLLM keeps the sliding caches' pages for hits at the end of prompts only; here at every block.
    result = model.run([Batch([first], 120), Batch([second], 30)], max_num_batched_tokens=256, prefix_cache_retention_interval=256)
    assert result.batches[0][0].token_ids == answer.token_ids
    assert result.batches[1][0].num_cached_tokens == 256
    model.check(second, result.batches[1][0])
