"""Latency and throughput of this package's model beside vLLM's own, on one GPU, with random weights.

    python -m benchmarks.throughput --layers 8 --json out.json --plot out.png

Both engines get DeepSeek-V4-Flash's configuration at full width, cut to ``--layers``: the whole model does not fit one GPU,
so the time of a step a layer is what can be compared. Each runs in a process of its own. Weights are what vLLM's ``dummy``
loader makes; ``--only plugin`` leaves vLLM's own model out (where it does not run).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.plots import plot_bars
from vllm_dsv4.checkpoint.tiny import preset_config


@dataclass(frozen=True)
class Engine:
    env: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)


ENGINES = {
    "plugin": Engine({"VLLM_PLUGINS": "dsv4"}),
    # Without the additions vLLM's own model compiles for minutes more before it is ready.
    "in-tree": Engine(
        {"VLLM_PLUGINS": "", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"},
        {"kernel_config": {"enable_jit_warmup": False}, "compilation_config": {"cudagraph_capture_sizes": [1, 8, 64]}},
    ),
}
REPEATS = 3


def main() -> None:
    args = _parse_args()
    if args.child is not None:
        _measure(args)
        return
    results = {name: _run_engine(name, args) for name in ENGINES if args.only in (None, name)}
    print(_table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.plot:
        plot_bars(args.plot, {name: result["figures"] for name, result in results.items()}, f"{args.layers} layers")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="requests decoded at once")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="prompt lengths before decoding")
    parser.add_argument("--prefill", type=int, nargs="+", default=[2048, 8192], help="lengths of prompts whose prefill is timed")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a timed run")
    parser.add_argument("--requests", type=int, default=128, help="requests of the throughput run: prompts of 32 to 2048 tokens")
    parser.add_argument("--only", choices=sorted(ENGINES))
    parser.add_argument("--engine", type=json.loads, default={}, help="more options of vllm.LLM, as JSON")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_engine(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """This script again, as a process that sees only the one engine."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        print(f"-- {name}", flush=True)
        started = time.time()
        command = [sys.executable, "-m", "benchmarks.throughput", *sys.argv[1:], "--only", name, "--child", str(answer)]
        subprocess.run(command, env={**os.environ, **ENGINES[name].env}, check=True)
        return {**json.loads(answer.read_text()), "total_seconds": time.time() - started}


def _measure(args: argparse.Namespace) -> None:
    from vllm import LLM

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(preset_config("flash", num_hidden_layers=args.layers)))
        llm = LLM(**_options(model, args))
    print(f"ready after {time.perf_counter() - started:.1f} s", flush=True)
    timer = _Timer(llm)
    timer.seconds(1, 64, 1)
    result: dict[str, Any] = {"first_token_seconds": time.perf_counter() - started}
    print(f"first token after {result['first_token_seconds']:.1f} s", flush=True)
    result["figures"] = _decode(timer, args) | _prefill(timer, args) | {"mixed: output tok/s": timer.mixed(args.requests, args.steps)}
    args.child.write_text(json.dumps(result))


def _options(model: str, args: argparse.Namespace) -> dict[str, Any]:
    longest = max([context + args.steps for context in args.context] + args.prefill + [2048 + args.steps]) + 64
    return {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "kv_cache_dtype": "fp8",
        "max_model_len": longest,
        "max_num_seqs": max(args.batch),
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "seed": 0,
        **ENGINES[args.only].options,
        **args.engine,
    }


class _Timer:
    def __init__(self, llm: Any):
        self.llm = llm
        self.random = random.Random(0)
        self.vocab_size = llm.llm_engine.model_config.get_vocab_size()

    def seconds(self, batch: int, length: int, new_tokens: int) -> float:
        return self._generate([length] * batch, new_tokens)

    def mixed(self, requests: int, new_tokens: int) -> float:
        """Output tokens a second over requests of many lengths, all submitted at once."""
        lengths = [self.random.randint(32, 2048) for _ in range(requests)]
        self._generate(lengths, 2)
        rate = requests * new_tokens / self._generate(lengths, new_tokens)
        print(f"{requests} mixed requests: {rate:.0f} output tok/s", flush=True)
        return rate

    def _generate(self, lengths: list[int], new_tokens: int) -> float:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": [self.random.randrange(2, self.vocab_size) for _ in range(length)]} for length in lengths]
        sampling = SamplingParams(max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        started = time.perf_counter()
        self.llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started


def _decode(timer: _Timer, args: argparse.Namespace) -> dict[str, float]:
    figures = {}
    for context in args.context:
        for batch in args.batch:
            timer.seconds(batch, context, 8)
            # The difference of a long and a short run leaves the prompts' time out.
            steps = [
                (timer.seconds(batch, context, 8 + args.steps) - timer.seconds(batch, context, 8)) / args.steps for _ in range(REPEATS)
            ]
            name = f"decode, batch {batch}, context {context}: ms/step"
            figures[name] = statistics.median(steps) * 1e3
            print(f"{name} {figures[name]:.3f}", flush=True)
    return figures


def _prefill(timer: _Timer, args: argparse.Namespace) -> dict[str, float]:
    figures = {}
    for length in args.prefill:
        timer.seconds(1, length, 1)
        name = f"prefill {length}: tok/s"
        figures[name] = length / statistics.median(timer.seconds(1, length, 1) for _ in range(REPEATS))
        print(f"{name} {figures[name]:.0f}", flush=True)
    return figures


def _table(results: dict[str, dict[str, Any]]) -> str:
    rows = {"first token: s": {name: result["first_token_seconds"] for name, result in results.items()}}
    for name, result in results.items():
        for figure, value in result["figures"].items():
            rows.setdefault(figure, {})[name] = value
    lines = [f"{'':42}" + "".join(f"{name:>12}" for name in results)]
    lines += [f"{figure:42}" + "".join(f"{row.get(name, float('nan')):12.3f}" for name in results) for figure, row in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
