"""Written checkpoints: their tensors and bytes, the quantised values, the tokenizer, and the command that writes them."""

from __future__ import annotations

import filecmp
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_dsv4.checkpoint.random_weights import random_values
from vllm_dsv4.checkpoint.reader import iter_headers, weight_files
from vllm_dsv4.checkpoint.schema import CheckpointError, check_checkpoint, checkpoint_schema
from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.checkpoint.tokenizer import ASSISTANT, BOS, CONTROL_TOKENS, EOS, MIN_VOCAB_SIZE, USER, VISIBLE_TOKENS, build_tokenizer
from vllm_dsv4.checkpoint.writer import write_checkpoint
from vllm_dsv4.cli.main import main
from vllm_dsv4.config import Dsv4Config

CONFIGS: dict[str, dict[str, Any]] = {
    "fp4": preset_config("tiny"),
    "fp8": preset_config("tiny", expert_dtype="fp8"),
    "bfloat16": preset_config("tiny", quantized=False),
    "float32": preset_config("tiny", quantized=False, dtype="float32"),
    "pro": preset_config("tiny-pro"),
    "0731": preset_config("tiny-0731"),
}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for name, raw in CONFIGS.items():
        write_checkpoint(root / name, raw, seed=3)
    return {name: root / name for name in CONFIGS}


def _load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in weight_files(folder) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_written_checkpoint_is_complete(folders: dict[str, Path], name: str) -> None:
    config = Dsv4Config.from_json(folders[name])
    assert config == Dsv4Config.from_hf(CONFIGS[name])
    headers = list(iter_headers(folders[name]))
    check_checkpoint(config, headers)
    assert any(tensor.startswith("mtp.0.") for tensor, _, _ in headers)


def _dtypes(folder: Path) -> dict[str, str]:
    return {name: dtype for name, _, dtype in iter_headers(folder)}


def test_dtypes_on_disk_are_those_of_the_real_checkpoint(folders: dict[str, Path]) -> None:
    """The table of model.md 2."""
    dtypes = _dtypes(folders["fp4"])
    expected = {
        "BF16": ("embed.weight", "head.weight", "norm.weight", "layers.0.attn.q_norm.weight", "layers.3.ffn.gate.weight"),
        "F32": ("hc_head_fn", "hc_head_scale", "layers.0.hc_ffn_base", "layers.0.attn.attn_sink", "layers.3.ffn.gate.bias"),
        "F8_E4M3": ("layers.0.attn.wq_a.weight", "layers.0.attn.wo_a.weight", "layers.0.ffn.shared_experts.w2.weight"),
        "F8_E8M0": ("layers.0.attn.wq_a.scale", "layers.0.ffn.experts.7.w3.scale", "layers.0.ffn.shared_experts.w2.scale"),
        "I8": ("layers.4.ffn.experts.0.w1.weight", "mtp.0.ffn.experts.0.w2.weight"),
        "I64": ("layers.0.ffn.gate.tid2eid",),
    }
    for dtype, names in expected.items():
        assert {dtypes[name] for name in names} == {dtype}, dtype
    assert {dtypes[f"layers.2.attn.{part}compressor.ape"] for part in ("", "indexer.")} == {"F32"}
    assert {dtypes[f"layers.2.attn.{part}compressor.wgate.weight"] for part in ("", "indexer.")} == {"BF16"}
    assert set(_dtypes(folders["fp8"]).values()) == {"BF16", "F32", "F8_E4M3", "I64"}
    assert set(_dtypes(folders["bfloat16"]).values()) == {"BF16", "F32", "I64"}
    assert set(_dtypes(folders["float32"]).values()) == {"F32", "I64"}


def test_index_names_every_tensor_and_its_file(folders: dict[str, Path]) -> None:
    index = json.loads((folders["fp4"] / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folders["fp4"].glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    total = 0
    for file in files:
        tensors = load_file(folders["fp4"] / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == set(tensors)
        total += sum(tensor.nbytes for tensor in tensors.values())
    assert index["metadata"]["total_size"] == total
    assert not list(folders["fp4"].glob(".*")), "no temporary file stays"


def _dequantise_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(weight.shape[0]) // 128, torch.arange(weight.shape[1]) // 128, indexing="ij")
    return weight.double() * scale.double()[rows, columns]


def _dequantise_mxfp4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    values, codes = torch.tensor(E2M1, dtype=torch.float64), weight.view(torch.uint8).long()
    out = torch.empty(weight.shape[0], 2 * weight.shape[1], dtype=torch.float64)
    out[:, 0::2], out[:, 1::2] = values[codes % 16], values[codes // 16]
    exponents = scale.view(torch.uint8).double() - 127
    return out * torch.exp2(exponents).repeat_interleave(32, dim=1)


def _originals(folder: Path, seed: int = 3) -> dict[str, torch.Tensor]:
    schema = checkpoint_schema(Dsv4Config.from_json(folder))
    names = [name for name, spec in schema.items() if spec.storage in ("fp8_weight", "mxfp4_weight")]
    return {name: random_values(name, schema[name], seed).double() for name in names}


@pytest.mark.parametrize("name", ["fp4", "fp8", "pro"])
def test_quantised_weights_are_close_to_the_originals(folders: dict[str, Path], name: str) -> None:
    """Half a step of each format: E4M3 has 3 mantissa bits, E2M1 one; near zero the step is that of the smallest numbers."""
    tensors, count = _load(folders[name]), {"fp8": 0, "mxfp4": 0}
    for weight_name, original in _originals(folders[name]).items():
        stored, scale = tensors[weight_name], tensors[weight_name.removesuffix("weight") + "scale"]
        if stored.dtype == torch.int8:
            count["mxfp4"] += 1
            value = _dequantise_mxfp4(stored, scale)
            steps = torch.exp2(scale.view(torch.uint8).double() - 127).repeat_interleave(32, dim=1)
            # Magnitudes 0 0.5 1 1.5 2 3 4 6: spaced by a half below 2, then by 1 and by 2.
            bound = steps * torch.where(original.abs() <= 2 * steps, 0.25, torch.where(original.abs() <= 4 * steps, 0.5, 1.0))
        else:
            count["fp8"] += 1
            value = _dequantise_blocks(stored, scale.float())
            unit = _dequantise_blocks(torch.ones_like(original), scale.float())
            bound = torch.maximum(original.abs() / 16, unit * 2.0**-10)
        # The scale is at least amax / largest magnitude up to float32 rounding, so clamping costs next to nothing.
        assert ((value - original).abs() <= bound * (1 + 1e-5)).all(), weight_name
        assert (value - original).abs().max() > 0
    assert count["fp8"] > 20 and (count["mxfp4"] == 0) == (name == "fp8")


def test_scales_use_the_formats_range(folders: dict[str, Path]) -> None:
    """UE8M0 scales are the smallest power of two that holds the block; Flash-Base-like float32 ones map the maximum to 448."""
    tensors = _load(folders["fp4"])
    weight, scale = tensors["layers.0.attn.wq_a.weight"].float(), tensors["layers.0.attn.wq_a.scale"].view(torch.uint8).int()
    original = _originals(folders["fp4"])["layers.0.attn.wq_a.weight"]
    for column in range(2):
        amax = original[:, 128 * column : 128 * (column + 1)].abs().max().item()
        assert scale[0, column].item() == math.ceil(math.log2(amax / 448)) + 127
    assert weight.abs().max() > 224
    tensors = _load(folders["fp8"])
    weight, scale = tensors["layers.0.ffn.experts.0.w1.weight"].float(), tensors["layers.0.ffn.experts.0.w1.scale"]
    assert scale.dtype == torch.float32 and not torch.equal(torch.exp2(torch.log2(scale).round()), scale)
    assert (weight.view(2, 128, 2, 128).abs().amax((1, 3)) == 448).all()


def test_weights_have_the_intended_distribution(folders: dict[str, Path]) -> None:
    """Model.md 8.2: nothing is left at zero, nothing is degenerate."""
    tensors = _load(folders["float32"])
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float32:
            assert tensor.abs().max() > 0 and tensor.isfinite().all(), name
    spread = {
        "embed.weight": (0, 1),
        "head.weight": (0, 256**-0.5),
        "layers.0.attn.wq_b.weight": (0, 128**-0.5),
        "layers.4.ffn.experts.5.w2.weight": (0, 256**-0.5),
        "layers.2.attn.compressor.ape": (0, 0.5),
        "layers.0.hc_attn_fn": (0, 1024**-0.5),
        "layers.0.attn.kv_norm.weight": (1, 0.1),
    }
    for name, (mean, std) in spread.items():
        tolerance = 6 * std / tensors[name].numel() ** 0.5
        assert abs(tensors[name].mean().item() - mean) < tolerance, name
        assert abs(tensors[name].std().item() - std) < tolerance, name


def test_routing_tables_hold_distinct_experts(folders: dict[str, Path]) -> None:
    table = _load(folders["pro"])["layers.1.ffn.gate.tid2eid"]
    assert table.shape == (1024, 3) and table.min() == 0 and table.max() == 11
    assert all(len(set(row)) == 3 for row in table.tolist())
    assert len(table.unique(dim=0)) > 400, "of 12 * 11 * 10 ordered choices"


def test_seed_decides_every_byte(tmp_path: Path, folders: dict[str, Path]) -> None:
    write_checkpoint(tmp_path / "again", CONFIGS["fp4"], seed=3)
    names = sorted(path.name for path in folders["fp4"].iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    _, mismatch, errors = filecmp.cmpfiles(folders["fp4"], tmp_path / "again", names, shallow=False)
    assert not mismatch and not errors
    write_checkpoint(tmp_path / "other", CONFIGS["fp4"], seed=4)
    one, other = _load(folders["fp4"]), _load(tmp_path / "other")
    for name, tensor in one.items():
        if not name.endswith(".scale"):
            assert not torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def test_quantised_and_plain_checkpoints_have_the_same_weights(folders: dict[str, Path]) -> None:
    quantised, plain = _load(folders["fp4"]), _load(folders["float32"])
    for name in ("layers.0.attn.wq_a.weight", "layers.3.ffn.shared_experts.w1.weight"):
        value = _dequantise_blocks(quantised[name], quantised[name.removesuffix("weight") + "scale"].float())
        assert torch.nn.functional.cosine_similarity(value.flatten(), plain[name].double().flatten(), dim=0) > 0.999
    assert torch.equal(quantised["hc_head_fn"], plain["hc_head_fn"])
    assert torch.equal(quantised["head.weight"], plain["head.weight"].bfloat16())


def test_options_of_the_writer(tmp_path: Path) -> None:
    raw, lines = preset_config("tiny", num_hidden_layers=1), []
    write_checkpoint(tmp_path, raw, include_draft=False, max_shard_bytes=200_000, progress=lines.append)
    headers = list(iter_headers(tmp_path))
    assert not any(name.startswith("mtp.") for name, _, _ in headers)
    assert len(lines) == 1 + len(weight_files(tmp_path))
    files = weight_files(tmp_path)
    assert len(files) > 5
    for path in files:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 200_000
    write_checkpoint(tmp_path, raw, include_draft=False)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(weight_files(tmp_path)) < len(files), "stale shards are removed"


def test_truncated_or_missing_shards_are_reported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, preset_config("tiny", num_hidden_layers=1))
    first, *_, last = weight_files(tmp_path)
    last.write_bytes(last.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=rf"{last.name} has .* is the download complete"):
        list(iter_headers(tmp_path))
    last.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        list(iter_headers(tmp_path))
    first.unlink()
    with pytest.raises(CheckpointError, match=f"1 of the .* are not there: {first.name}"):
        list(iter_headers(tmp_path))


TEXTS = [
    "",
    "Hello, how are you?",
    "  two  spaces\n\n\ttabs\r\n",
    "naïve 你好 🙂 \x00\x7f",
    'x = {"a": [1, 2.5e-3]}  # ok',
    "<|not special|>",
]


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, 300, 1024, 5000])
def test_tokenizer_round_trip(vocab_size: int) -> None:
    tokenizer = build_tokenizer(vocab_size)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    assert sorted(vocab.values()) == list(range(vocab_size)), "every row of the embedding is a token"
    assert (vocab[BOS], vocab[EOS]) == (0, 1)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids[0] == 0 and max(ids) < vocab_size
        assert tokenizer.decode(ids) == text
    assert all(isinstance(tokenizer.decode([token], skip_special_tokens=False), str) for token in range(vocab_size))


def test_special_tokens_are_single_tokens() -> None:
    tokenizer = build_tokenizer(1024)
    for token in (*CONTROL_TOKENS, *VISIBLE_TOKENS):
        ids = tokenizer.encode(f"a{token}b", add_special_tokens=False).ids
        assert tokenizer.token_to_id(token) in ids and len(ids) == 3
        assert tokenizer.decode(ids) == ("ab" if token in CONTROL_TOKENS else f"a{token}b")


def test_tokenizer_compresses_text() -> None:
    text = "The server takes many requests and the model gives a token to each of them."
    assert len(build_tokenizer(1024).encode(text).ids) < len(text) / 2.5


def test_small_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    lines: list[str] = []
    write_checkpoint(tmp_path, preset_config("tiny", num_hidden_layers=1, vocab_size=256), progress=lines.append)
    assert not (tmp_path / "tokenizer.json").exists()
    assert "skip-tokenizer-init" in lines[0]
    with pytest.raises(ValueError, match=f"at least {MIN_VOCAB_SIZE}"):
        build_tokenizer(256)


CONVERSATIONS = {
    "user": [{"role": "user", "content": "Hello"}],
    "system": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}],
    "turns": [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two", "reasoning": "count"},
        {"role": "user", "content": "Three"},
    ],
}


@pytest.mark.parametrize("thinking", [False, True], ids=["chat", "thinking"])
@pytest.mark.parametrize("case", CONVERSATIONS)
def test_chat_template_equals_vllms_encoder(folders: dict[str, Path], case: str, thinking: bool) -> None:
    encoding = pytest.importorskip("vllm.tokenizers.deepseek_v4_encoding")
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folders["fp4"])
    messages = CONVERSATIONS[case]
    expected = encoding.encode_messages(messages, thinking_mode="thinking" if thinking else "chat", reasoning_effort="low")
    assert tokenizer.apply_chat_template(messages, tokenize=False, thinking=thinking) == expected
    ids = tokenizer.apply_chat_template(messages, tokenize=True, thinking=thinking, return_dict=False)
    assert ids == tokenizer.encode(expected, add_special_tokens=False)
    assert ids.count(0) == 1 and ids[0] == 0


def test_vllm_tokenizer_serves_chat(folders: dict[str, Path]) -> None:
    """The class that vLLM uses for this architecture, with the defaults of its chat endpoint."""
    module = pytest.importorskip("vllm.tokenizers.deepseek_v4")
    tokenizer = module.DeepseekV4Tokenizer.from_pretrained(str(folders["fp4"]))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (0, 1, 1024)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    special = tokenizer.get_vocab()
    assert ids[0] == 0 and ids[-2:] == [special[ASSISTANT], special["<think>"]] and special[USER] in ids
    assert tokenizer.decode(ids).startswith(BOS) and max(ids) < 1024


def test_transformers_reads_the_folder(folders: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(folders["fp4"])
    generation = transformers.GenerationConfig.from_pretrained(folders["fp4"])
    assert (config.bos_token_id, config.eos_token_id) == (generation.bos_token_id, generation.eos_token_id) == (0, 1)
    assert Dsv4Config.from_hf(config) == Dsv4Config.from_hf(CONFIGS["fp4"])


class TestMakeCheckpointCommand:
    def test_writes_a_checkpoint_and_says_what_is_next(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "new" / "folder"
        assert main(["make-checkpoint", str(folder), "--layers", "3", "--seed", "5", "--experts", "fp8"]) == 0
        output = capsys.readouterr().out
        assert "shard 1:" in output and f"--model {folder}" in output.splitlines()[-1]
        config = Dsv4Config.from_json(folder)
        assert (config.num_hidden_layers, config.compress_ratios) == (3, (0, 0, 4))
        assert config.quantization is not None and config.quantization.experts == "fp8"
        check_checkpoint(config, iter_headers(folder))

    def test_unquantised_float32(self, tmp_path: Path) -> None:
        assert main(["make-checkpoint", str(tmp_path), "--unquantised", "--dtype", "float32", "--layers", "1", "--no-draft"]) == 0
        assert Dsv4Config.from_json(tmp_path).quantization is None
        assert set(_dtypes(tmp_path).values()) == {"F32", "I64"}

    def test_follows_a_config_file(self, tmp_path: Path) -> None:
        raw = preset_config("tiny-pro", num_hidden_layers=2, vocab_size=512)
        (tmp_path / "my.json").write_text(json.dumps(raw))
        assert main(["make-checkpoint", str(tmp_path / "out"), "--config", str(tmp_path / "my.json")]) == 0
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw

    def test_does_not_overwrite_without_force(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "precious").write_text("data")
        assert main(["make-checkpoint", str(tmp_path), "--layers", "1"]) == 2
        assert "is not empty" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["precious"]
        assert main(["make-checkpoint", str(tmp_path), "--layers", "1", "--force"]) == 0
        assert (tmp_path / "precious").read_text() == "data"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--layers", "0"], "--layers must be at least 1"),
            (["--unquantised", "--experts", "fp4"], "leave it out with --unquantised"),
            (["--config", "nowhere.json"], "nowhere.json is neither"),
            (["--config", "CONFIG", "--dtype", "float16"], "leave out --dtype"),
            (["--config", "BROKEN"], "is not JSON"),
            (["--config", "UNSUPPORTED"], "compress ratio 7 of layer 0"),
            (["--shard-mb", "-1"], "--shard-mb must be above 0"),
        ],
    )
    def test_errors_are_one_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
        raw = preset_config("tiny")
        files = {"CONFIG": json.dumps(raw), "BROKEN": "{", "UNSUPPORTED": json.dumps({**raw, "compress_ratios": [7] * 6})}
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        arguments = [str(tmp_path / argument) if argument in files else argument for argument in arguments]
        assert main(["make-checkpoint", str(tmp_path / "out"), *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
        assert not (tmp_path / "out").exists()
