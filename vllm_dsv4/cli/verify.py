"""``vllm-dsv4 verify``: does the served model say what the dense model says?"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vllm_dsv4.cli.comparison import Comparison, Difference, Divergence, ServedText, compare
from vllm_dsv4.cli.environment import VllmStatus, plugin_problems
from vllm_dsv4.reference.model import DenseModel

_TOP = 5
"""Likeliest tokens to compare at each position, beside the text's own."""
_TEXT = "The quick brown fox jumps over the lazy dog; a model that is served correctly will tell you why."
_EXIT_DIFFERS = 1

_DESCRIPTION = """\
Serve a checkpoint with vLLM, let it continue random prompts greedily, and compare all log-probabilities and the text with
the dense model: the same model evaluated over each whole sequence at once, without any cache, in float64 on the CPU.
Exits with 1 if they differ by more than the tolerance. The dense model is slow and holds all weights: this is for small
checkpoints, such as those of make-checkpoint.
"""


def register(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify", help="compare the served model with the dense reference", description=_DESCRIPTION
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the checkpoint")
    parser.add_argument("--prompts", metavar="N", type=int, default=3, help="random prompts (default: 3), beside one of text")
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=300, help="length of the random prompts (default: 300)")
    parser.add_argument("--new-tokens", metavar="N", type=int, default=20, help="tokens to generate after each prompt (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts (default: 0)")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8", "bfloat16"), default="auto", help="as vLLM's option")
    parser.add_argument("--indexer", choices=("auto", "fp8", "mxfp4"), default="auto", help="format of the indexer's keys")
    parser.add_argument("--tolerance", metavar="X", type=float, default=1e-4, help="largest difference in nats (default: 1e-4)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to stderr")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check(args)
    dense = DenseModel.from_checkpoint(args.folder, kv_format=args.kv_cache_dtype, indexer_format=args.indexer)
    prompts = _prompts(args, dense.config.vocab_size)
    longest = max(len(prompt) for prompt in prompts) + args.new_tokens
    if longest > dense.config.max_position_embeddings:
        raise ValueError(
            f"prompt and new tokens make {longest}, the model has {dense.config.max_position_embeddings} positions; ask for less"
        )
    with _progress(f"serving {len(prompts)} prompts"):
        served = serve(args.folder, prompts, args, dense.weights.dtype, longest)
    with _progress("evaluating the same texts densely"):
        rows = [dense.log_probs(text.sequence[:-1]) for text in served]
    comparison = compare(served, rows)
    if args.json:
        print(json.dumps(_as_json(comparison, args.tolerance), indent=2))
    else:
        _print(comparison, args.tolerance, _text_of(args.folder, served[-1]))
    return 0 if comparison.agrees(args.tolerance) else _EXIT_DIFFERS


def serve(folder: Path, prompts: list[list[int]], args: argparse.Namespace, dtype: torch.dtype, max_model_len: int) -> list[ServedText]:
    """Continue prompts greedily with ``vllm.LLM``.

    Raises:
        ValueError: vLLM is not installed, or would not use this package.
    """
    _set_environment()
    try:
        import vllm
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise ValueError(f"verify needs vLLM, which cannot be imported ({error}); install vllm-dsv4[cpu] or [gpu]") from error
    # vLLM would serve a model of its own instead, and that one would be verified.
    problems = plugin_problems(VllmStatus(vllm.__version__))
    if problems:
        raise ValueError("; ".join(problems))
    llm = LLM(
        model=str(folder),
        # Otherwise vLLM serves a float32 checkpoint in bfloat16.
        dtype=str(dtype).removeprefix("torch."),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=max_model_len,
        max_num_seqs=len(prompts),
        kv_cache_dtype=args.kv_cache_dtype,
        attention_config={"indexer_kv_dtype": args.indexer},
        seed=0,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=args.new_tokens, ignore_eos=True, detokenize=False, logprobs=_TOP, prompt_logprobs=_TOP
    )
    requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [_served_text(output) for output in llm.generate(requests, sampling, use_tqdm=False)]


def _served_text(output: Any) -> ServedText:
    completion = output.outputs[0]
    # The first token of a prompt has no log-probability.
    reported = [*output.prompt_logprobs[1:], *completion.logprobs]
    log_probs = [{token: entry.logprob for token, entry in at.items()} for at in reported]
    return ServedText(list(output.prompt_token_ids), list(completion.token_ids), log_probs)


def _set_environment() -> None:
    """Quiet logs, off stdout; on the CPU one process, and a small cache instead of most of the memory. The user's settings win."""
    settings = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    if not torch.cuda.is_available():
        settings |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _check(args: argparse.Namespace) -> None:
    if not (args.folder / "config.json").is_file():
        raise ValueError(f"{args.folder} has no config.json; give the folder of a checkpoint")
    for option in ("prompts", "prompt_tokens", "new_tokens"):
        if getattr(args, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} must be at least 1, got {getattr(args, option)}")
    if not args.tolerance >= 0:
        raise ValueError(f"--tolerance must not be negative, got {args.tolerance}")


def _prompts(args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """The random prompts, then one of text if the folder has a tokenizer."""
    draw = random.Random(args.seed)
    prompts = [[draw.randrange(vocab_size) for _ in range(args.prompt_tokens)] for _ in range(args.prompts)]
    tokenizer = _tokenizer(args.folder)
    return prompts if tokenizer is None else [*prompts, tokenizer.encode(_TEXT).ids]


def _tokenizer(folder: Path) -> Any:
    if not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _text_of(folder: Path, text: ServedText) -> str | None:
    tokenizer = _tokenizer(folder)
    return None if tokenizer is None else tokenizer.decode(text.sequence)


@contextmanager
def _progress(step: str) -> Iterator[None]:
    print(f"{step} ...", end="", file=sys.stderr, flush=True)
    start = time.monotonic()
    yield
    print(f" {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def _as_json(comparison: Comparison, tolerance: float) -> dict[str, Any]:
    return {
        "agrees": comparison.agrees(tolerance),
        "tolerance": tolerance,
        "num_prompts": comparison.num_prompts,
        "num_log_probs": comparison.num_values,
        "largest_difference": {"nats": comparison.largest.size, **asdict(comparison.largest)},
        "greedy_text_agrees": not comparison.divergences,
        "divergences": [asdict(divergence) for divergence in comparison.divergences],
    }


def _print(comparison: Comparison, tolerance: float, text: str | None) -> None:
    if text is not None:
        print(f"served text: {text!r}")
    print(f"{comparison.num_values} log-probabilities of {comparison.num_prompts} prompts; {_describe(comparison.largest)}")
    if not comparison.divergences:
        print("greedy text: the same")
    for divergence in comparison.divergences:
        print(f"greedy text: {_describe_divergence(divergence)}")
    print(f"{'agree' if comparison.agrees(tolerance) else 'DO NOT AGREE'} within {tolerance:g}")


def _describe(largest: Difference) -> str:
    return (
        f"largest difference {largest.size:.2e} nats, at prompt {largest.prompt}, position {largest.position}, token {largest.token}: "
        f"served {largest.served:.7f}, dense {largest.dense:.7f}"
    )


def _describe_divergence(divergence: Divergence) -> str:
    return (
        f"prompt {divergence.prompt} differs from position {divergence.position}: served token {divergence.served_token}, dense "
        f"{divergence.dense_token}, likelier by {divergence.margin:.2e} nats (its best two are {divergence.top2_gap:.2e} apart)"
    )
