"""``vllm-dsv4 make-checkpoint``: write a checkpoint of random weights."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from vllm_dsv4.checkpoint.tiny import PRESETS, preset_config
from vllm_dsv4.cli.doctor import load_model_config

_DESCRIPTION = """\
Write a checkpoint with random weights, stored as DeepSeek's own: native names, FP8 and MXFP4 weights, shards with an index,
config.json, tokenizer and chat template. The same arguments give the same files.
"""


def register(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "make-checkpoint", help="write a small random checkpoint", description=_DESCRIPTION
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to write; created if needed")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--preset", choices=sorted(PRESETS), default="tiny", help="a named configuration (default: tiny)")
    source.add_argument("--config", metavar="FILE", type=Path, help="a config.json to follow to the letter")
    parser.add_argument("--layers", metavar="N", type=int, help="number of layers, instead of the preset's")
    parser.add_argument("--experts", choices=("fp4", "fp8"), help="how the routed experts are quantised (default: fp4)")
    parser.add_argument("--unquantised", "--unquantized", action="store_true", help="plain weights in --dtype")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of what is not quantised (default: bfloat16)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    parser.add_argument("--no-draft", action="store_true", help="leave out the draft (mtp.*) tensors")
    parser.add_argument("--shard-mb", metavar="N", type=float, help="largest shard in MB (default: a third of the checkpoint)")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm_dsv4.checkpoint.writer import write_checkpoint

    raw_config = _raw_config(args)
    if args.shard_mb is not None and args.shard_mb <= 0:
        raise ValueError(f"--shard-mb must be above 0, got {args.shard_mb:g}")
    if args.folder.exists() and not args.folder.is_dir():
        raise ValueError(f"{args.folder} is a file; give the name of a folder")
    if args.folder.exists() and any(args.folder.iterdir()) and not args.force:
        raise ValueError(f"{args.folder} is not empty; choose another folder, or pass --force to replace the checkpoint in it")
    start = time.monotonic()
    total_bytes = write_checkpoint(
        args.folder,
        raw_config,
        seed=args.seed,
        max_shard_bytes=None if args.shard_mb is None else int(args.shard_mb * 1e6),
        include_draft=not args.no_draft,
        progress=lambda line: print(f"  {line}", flush=True),
    )
    print(f"{args.folder}: {total_bytes / 1e6:.1f} MB of weights in {time.monotonic() - start:.1f} s")
    print(f"Next: python -m vllm.entrypoints.openai.api_server --model {args.folder}")
    return 0


def _raw_config(args: argparse.Namespace) -> dict[str, Any]:
    if args.config is None:
        overrides = {} if args.layers is None else {"num_hidden_layers": args.layers}
        if args.layers is not None and args.layers < 1:
            raise ValueError(f"--layers must be at least 1, got {args.layers}")
        if args.unquantised and args.experts:
            raise ValueError("--experts chooses a quantised format; leave it out with --unquantised")
        return preset_config(
            args.preset,
            quantized=not args.unquantised,
            expert_dtype=args.experts or "fp4",
            dtype=args.dtype or "bfloat16",
            **overrides,
        )
    given = [option for option in ("layers", "experts", "unquantised", "dtype") if getattr(args, option)]
    if given:
        raise ValueError(f"--config is followed to the letter; leave out {', '.join(f'--{option}' for option in given)} or edit the file")
    return load_model_config(str(args.config))
