"""The engine on a GPU, with its kernels, against the dense reference: tokens and log-probabilities of quantised checkpoints.

Kernels round sums to bfloat16 elsewhere than the reference, and a difference of one rounding can tip a choice of experts or
entries that was nearly a tie, in random models more often than in trained ones. So what must hold is that every generated
token is the reference's likeliest, given the same text before it, unless others are within ``NEAR_TIE`` of it, and that
log-probabilities differ little on average.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import Batch, Completion, run_engine
from oracle import random_prompt

from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.checkpoint.writer import write_checkpoint
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.kernels._specializations import Shapes, launches
from vllm_dsv4.reference.model import DenseModel

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]

NEAR_TIE = 0.15
MEDIAN_DIFFERENCE = 0.02
NEW_TOKENS = 40
OPTIONS: dict[str, Any] = {"enforce_eager": False, "gpu_memory_utilization": 0.3, "max_num_seqs": 64}

# name: options of the engine
ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 96},
    "preemption": {"num_gpu_blocks_override": 12, "max_model_len": 1024},
    "mxfp4_indexer": {"attention_config": {"indexer_kv_dtype": "mxfp4"}},
}


@pytest.fixture(scope="module", params=["tiny", "tiny-pro"])
def checkpoint(request, tmp_path_factory) -> tuple[Any, DenseModel, int]:
    folder = tmp_path_factory.mktemp(request.param)
    config = preset_config(request.param)
    write_checkpoint(folder, config, seed=3)
    return folder, DenseModel.from_checkpoint(folder), config["vocab_size"]


def check(model: DenseModel, prompt: list[int], completion: Completion) -> list[float]:
    """Assert that every token is the likeliest, or nearly; the differences of log-probabilities."""
    expected = model.log_probs(prompt + completion.token_ids)[len(prompt) - 1 : -1]
    chosen = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert (expected.amax(-1) - chosen).max() <= NEAR_TIE
    return [abs(value - expected[step, token].item()) for step, at in enumerate(completion.logprobs) for token, value in at.items()]


@pytest.mark.parametrize("engine", ENGINES)
def test_served_equals_dense(engine: str, checkpoint: tuple[Any, DenseModel, int]) -> None:
    folder, model, vocab_size = checkpoint
    if engine == "mxfp4_indexer":
        model = DenseModel.from_checkpoint(folder, indexer_format="mxfp4")
    prompts = [random_prompt(vocab_size, length, seed=length) for length in (1, 3, 127, 128, 300, 517)]
    # The second batch continues the first one's prompts: prefix hits.
    batches = [Batch(prompts, NEW_TOKENS), Batch([prompt + prompt[:5] for prompt in prompts], NEW_TOKENS)]
    result = run_engine(folder, batches, **{**OPTIONS, **ENGINES[engine]})
    differences: list[float] = []
    for batch, completions in zip(batches, result.batches, strict=True):
        for prompt, completion in zip(batch.prompts, completions, strict=True):
            differences += check(model, prompt, completion)
    print(f"\n{engine}: median {statistics.median(differences):.4f}, largest {max(differences):.4f}, start {result.startup_seconds:.1f} s")
    assert statistics.median(differences) <= MEDIAN_DIFFERENCE


def test_many_requests(checkpoint: tuple[Any, DenseModel, int]) -> None:
    """64 requests of all lengths at once, more than fit into a step."""
    folder, model, vocab_size = checkpoint
    prompts = [random_prompt(vocab_size, 1 + 13 * index, seed=index) for index in range(64)]
    result = run_engine(folder, [Batch(prompts, NEW_TOKENS)], **OPTIONS)
    differences = [d for prompt, completion in zip(prompts, result.batches[0], strict=True) for d in check(model, prompt, completion)]
    print(f"\n64 requests: median {statistics.median(differences):.4f}, largest {max(differences):.4f}")
    assert statistics.median(differences) <= MEDIAN_DIFFERENCE


def test_a_long_prompt(tmp_path: Path) -> None:
    """57,794 tokens in chunks of 8,192, against the reference ops on the same GPU: the dense model would take an hour."""
    sizes = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_nextn_predict_layers": 0}
    config = preset_config("tiny", max_position_embeddings=65_536, **sizes)
    write_checkpoint(tmp_path, config, seed=3, include_draft=False)
    batch = Batch([random_prompt(config["vocab_size"], 57_794, seed=1)], NEW_TOKENS)
    options = {**OPTIONS, "max_model_len": 57_794 + NEW_TOKENS, "max_num_batched_tokens": 8192}
    [[served]] = run_engine(tmp_path, [batch], **options).batches
    [[expected]] = run_engine(tmp_path, [batch], {"VLLM_DSV4_BACKEND": "reference"}, **{**options, "enforce_eager": True}).batches
    differences: list[float] = []
    for token, likeliest, values, expected_values in zip(
        served.token_ids, expected.token_ids, served.logprobs, expected.logprobs, strict=True
    ):
        differences += [abs(values[known] - expected_values[known]) for known in values.keys() & expected_values.keys()]
        if token != likeliest:  # from here on the two continue different texts
            assert expected_values[likeliest] - expected_values[token] <= NEAR_TIE
            break
    assert statistics.median(differences) <= MEDIAN_DIFFERENCE


def test_nothing_is_compiled_after_the_start(tmp_path: Path) -> None:
    """An engine that only starts fills Triton's cache; one that also serves, with lengths up to 64k, adds nothing of ours to it."""
    config = preset_config("tiny", max_position_embeddings=131_072)
    write_checkpoint(tmp_path / "model", config, seed=3)
    shapes = Shapes(Dsv4Config.from_hf(config))
    ours = {launch.kernel.__name__ for launch in launches(shapes, torch.cuda.get_device_capability(), 132)}
    env = {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    options = {**OPTIONS, "max_model_len": 65_600, "max_num_batched_tokens": 8192}
    prompts = [random_prompt(config["vocab_size"], length, seed=length) for length in (1, 2, 5, 33, 127, 600, 2049, 9000, 30_000, 65_536)]

    run_engine(tmp_path / "model", [], env, **options)
    started = _compiled(tmp_path / "cache")
    run_engine(tmp_path / "model", [Batch([prompt], 20) for prompt in prompts] + [Batch(prompts, 20)], env, **options)
    assert {name for name, _ in started} >= ours
    assert not {kernel for kernel in _compiled(tmp_path / "cache") - started if kernel[0] in ours}


def _compiled(cache: Path) -> set[tuple[str, str]]:
    """Name and key of every kernel in Triton's cache on disk."""
    files = [file for file in cache.glob("*/*.json") if not file.name.startswith("__grp__")]
    return {(json.loads(file.read_text())["name"], file.parent.name) for file in files}
