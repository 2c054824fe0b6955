"""Loading: every tensor lands where it belongs with the bytes that it has on disk, and a checkpoint with any fault is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import Batch, run_engine
from safetensors.torch import load_file, save_file

from vllm_dsv4.checkpoint.schema import CheckpointError
from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.checkpoint.writer import INDEX_FILE, write_checkpoint
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.reference.model import DenseModel

pytest.importorskip("vllm")

from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402

from vllm_dsv4.attention.cache import CacheFactory, CacheLayer  # noqa: E402
from vllm_dsv4.quantization.formats import CompressorStateFormat  # noqa: E402

Tensors = dict[str, torch.Tensor]
CONFIGS: dict[str, dict[str, Any]] = {
    "fp4": preset_config("tiny"),
    "fp8": preset_config("tiny", expert_dtype="fp8"),
    "pro-fp8": preset_config("tiny-pro", expert_dtype="fp8"),
    # As many ratios past the backbone as that release has.
    "0731": preset_config("tiny-0731", compress_ratios=[0, 0, 4, 128, 4, 0, 0, 0]),
    "bfloat16": preset_config("tiny", quantized=False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for name, raw in CONFIGS.items():
        write_checkpoint(root / name, raw)
    return {name: root / name for name in CONFIGS}


@pytest.fixture(scope="module")
def tensors(folders: dict[str, Path]) -> dict[str, Tensors]:
    return {
        name: {tensor: value for file in folder.glob("*.safetensors") for tensor, value in load_file(file).items()}
        for name, folder in folders.items()
    }


def _vllm_config(folder: Path) -> Any:
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=512).create_engine_config()


@pytest.fixture(scope="module")
def load_model(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], torch.nn.Module]]:
    """``load_model(folder)``: the model with its weights, as a worker has it, without the engine around it."""
    with set_current_vllm_config(_vllm_config(folders["fp4"])):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('group')}/rendezvous", 0, "gloo")
        initialize_model_parallel()

    def load(folder: Path) -> torch.nn.Module:
        config = _vllm_config(folder)
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(config)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        return model

    yield load
    cleanup_dist_env_and_memory()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, Any], Tensors], Path]:
    def write(raw: dict[str, Any], content: Tensors) -> Path:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, folder / "model.safetensors")
        return folder

    return write


# Where tensors land.


def _powers_of_two(scale: torch.Tensor) -> torch.Tensor:
    """E8M0, spelt out: byte b is 2^(b - 127), and float32 holds all of them, 2^-127 as a subnormal."""
    values = [math.ldexp(1.0, byte - 127) for byte in scale.view(torch.uint8).flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).float().view(scale.shape)


def _widened(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scale = scale if scale.dtype == torch.float32 else _powers_of_two(scale)
    blocks = torch.kron(scale.double(), torch.ones(128, 128, dtype=torch.float64))
    return (weight.double() * blocks).bfloat16()


def _stacked_experts(content: Tensors, prefix: str, num_experts: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, 2I, ...] with w1's rows before w3's, and [E, D, ...]."""
    read = lambda expert, name: content[f"{prefix}{expert}.{name}.{kind}"]  # noqa: E731
    w13 = [torch.cat([read(expert, "w1").view(torch.uint8), read(expert, "w3").view(torch.uint8)]) for expert in range(num_experts)]
    return torch.stack(w13), torch.stack([read(expert, "w2").view(torch.uint8) for expert in range(num_experts)])


def _expected_parameters(content: Tensors, num_experts: int) -> Tensors:
    """The parameters that a checkpoint should give: names as on disk, experts stacked, ``wo_a`` widened."""
    expected: Tensors = {}
    for name, tensor in content.items():
        if name.startswith("mtp.") or name.endswith("wo_a.scale"):
            continue
        if name.endswith("wo_a.weight") and tensor.dtype == torch.float8_e4m3fn:
            tensor = _widened(tensor, content[name.removesuffix("weight") + "scale"])
        elif match := re.fullmatch(r"(layers\.\d+\.ffn\.experts\.)0\.w1\.(weight|scale)", name):
            prefix, kind = match.groups()
            stacked = _stacked_experts(content, prefix, num_experts, kind)
            suffix = "" if kind == "weight" else "_scale"
            for part, value in zip(("w13", "w2"), stacked, strict=True):
                expected[f"{prefix}routed_experts.{part}_weight{suffix}"] = value
            continue
        elif ".ffn.experts." in name:
            continue
        elif tensor.dtype == torch.float8_e8m0fnu:
            tensor = _powers_of_two(tensor)
        elif tensor.dtype == torch.int64:
            tensor = tensor.int()
        expected[name] = tensor
    return expected


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_lands_bit_for_bit(folders: dict[str, Path], tensors: dict[str, Tensors], load_model: Any, name: str) -> None:
    model = load_model(folders[name])
    expected = _expected_parameters(tensors[name], CONFIGS[name]["n_routed_experts"])
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(expected)
    for parameter_name, value in expected.items():
        parameter = parameters[parameter_name].data
        assert torch.equal(parameter.contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), parameter_name


def test_e8m0_scales_are_reinterpreted(tensors: dict[str, Tensors], load_model: Any, write: Any) -> None:
    """All finite bytes, among them 0 (2^-127, subnormal in float32) and 254 (2^127)."""
    content = dict(tensors["fp4"])
    all_bytes = torch.arange(255, dtype=torch.uint8)
    linear, expert = "layers.1.attn.wq_b.scale", "layers.2.ffn.experts.5.w3.scale"
    content[linear] = torch.tensor([0, 1, 126, 127, 128, 253, 254, *range(9)], dtype=torch.uint8)[:, None].view(torch.float8_e8m0fnu)
    content[expert] = all_bytes.repeat(9)[: 256 * 8].view(256, 8).view(torch.float8_e8m0fnu)
    model = load_model(write(CONFIGS["fp4"], content))
    scale = model.get_parameter(linear)
    assert scale.dtype == torch.float32 and scale[0, 0] == 2.0**-127 and scale[3, 0] == 1 and scale[6, 0] == 2.0**127
    assert torch.equal(scale, _powers_of_two(content[linear]))
    stacked = model.get_parameter("layers.2.ffn.experts.routed_experts.w13_weight_scale")
    assert stacked.dtype == torch.uint8 and torch.equal(stacked[5, 256:], content[expert].view(torch.uint8))


def test_token_ids_outside_of_the_vocabulary_take_the_nearest_row(folders: dict[str, Path], load_model: Any) -> None:
    """No request may end the engine; vLLM refuses such ids first, unless a step's padding holds them."""
    model = load_model(folders["fp4"])
    rows = model.embed_input_ids(torch.tensor([-1, 1024, 2**31 - 1]))
    assert torch.equal(rows, model.embed.weight[[0, 1023, 1023]])


def test_0731_backbone_is_that_of_the_base_release(tensors: dict[str, Tensors]) -> None:
    """The same seed gives the same weights, so ``test_every_tensor_lands_bit_for_bit`` says the same of the loaded models."""
    backbone = {name for name in tensors["fp4"] if not name.startswith("mtp.")}
    assert backbone == {name for name in tensors["0731"] if not name.startswith("mtp.")}
    assert all(torch.equal(tensors["fp4"][name].view(torch.uint8), tensors["0731"][name].view(torch.uint8)) for name in backbone)


# Faults. Each changes a complete checkpoint.

LINEAR, EXPERT = "layers.0.attn.wq_a", "layers.4.ffn.experts.7.w2"
Change = Callable[[Tensors], Any]


def _replace(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda content: content.update({name: change(content[name])})


FAULTS: dict[str, tuple[str, Change, str]] = {
    "missing": ("fp4", lambda content: content.pop("layers.3.attn.compressor.ape"), r"missing \(1\):\n +layers.3.attn.compressor.ape"),
    "missing-expert": ("fp4", lambda content: content.pop(f"{EXPERT}.scale"), rf"missing \(1\):\n +{EXPERT}.scale"),
    "unexpected": (
        "fp4",
        lambda content: content.update({f"{LINEAR}.bias": torch.zeros(128)}),
        rf"unexpected \(1\):\n +{LINEAR}.bias",
    ),
    "misshapen": ("fp4", _replace(f"{LINEAR}.weight", lambda w: w[:, :-1]), rf"{LINEAR}.weight is \[128, 255\], expected \[128, 256\]"),
    "misshapen-expert": (
        "fp4",
        _replace(f"{EXPERT}.weight", lambda w: w[:-2]),
        rf"{EXPERT}.weight is \[254, 128\], expected \[256, 128\]",
    ),
    "one-vector": ("bfloat16", _replace("norm.weight", lambda w: w[None]), r"norm.weight is \[1, 256\], expected \[256\]"),
    "bfloat16-for-fp8": (
        "fp4",
        _replace(f"{LINEAR}.weight", lambda w: w.bfloat16()),
        rf"{LINEAR}.weight is BF16, expected F8_E4M3",
    ),
    "uint8-for-e8m0": (
        "fp4",
        _replace(f"{LINEAR}.scale", lambda s: s.view(torch.uint8)),
        rf"{LINEAR}.scale is U8, expected F32 or F8_E8M0",
    ),
    "float32-for-e8m0": ("fp4", _replace(f"{EXPERT}.scale", lambda s: s.float()), rf"{EXPERT}.scale is F32, expected F8_E8M0"),
    "e5m2": (
        "fp8",
        _replace(f"{EXPERT}.weight", lambda w: w.view(torch.float8_e5m2)),
        rf"{EXPERT}.weight is F8_E5M2, expected F8_E4M3",
    ),
    "float-table": (
        "fp4",
        _replace("layers.0.ffn.gate.tid2eid", lambda t: t.float()),
        r"layers.0.ffn.gate.tid2eid is F32, expected I32 or I64",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(tensors: dict[str, Tensors], load_model: Any, write: Any, fault: str) -> None:
    name, change, message = FAULTS[fault]
    content = dict(tensors[name])
    change(content)
    with pytest.raises(CheckpointError) as error:
        load_model(write(CONFIGS[name], content))
    assert str(error.value).startswith("the checkpoint's tensors do not match its config.json:")
    assert re.search(message, str(error.value)), str(error.value)
    kinds = re.findall(r"^  [a-z ]+ \(\d+\):", str(error.value), re.MULTILINE)
    assert len(kinds) == 1, "and nothing else is"


@pytest.mark.parametrize(("expert", "seen"), [(8, "0 to 8"), (-1, "-1 to 7")])
def test_a_table_that_names_an_expert_that_does_not_exist(
    tensors: dict[str, Tensors], load_model: Any, write: Any, expert: int, seen: str
) -> None:
    table = tensors["fp4"]["layers.0.ffn.gate.tid2eid"].clone()
    table[3, 1] = expert
    with pytest.raises(CheckpointError, match=rf"layers.0.ffn.gate.tid2eid names experts from {seen}, the model has 0 to 7"):
        load_model(write(CONFIGS["fp4"], {**tensors["fp4"], "layers.0.ffn.gate.tid2eid": table}))


@pytest.mark.parametrize(
    ("config", "content", "message"),
    [
        ("fp4", "fp8", r"layers.0.ffn.experts.0.w1.weight is F8_E4M3, expected I8\n[^$]*is expert_dtype .* right for these files\?"),
        ("fp8", "fp4", r"layers.0.ffn.experts.0.w1.weight is I8, expected F8_E4M3\n[^$]*is expert_dtype .* right for these files\?"),
        ("bfloat16", "fp4", r"unexpected[^$]*layers.0.attn.wq_a.scale[^$]*wq_a.weight is F8_E4M3, expected BF16 or F16 or F32\n"),
        ("fp4", "bfloat16", r"missing[^$]*layers.0.attn.wq_a.scale[^$]*wq_a.weight is BF16, expected F8_E4M3\n"),
    ],
    ids=["fp8-experts-as-fp4", "fp4-experts-as-fp8", "quantised-as-plain", "plain-as-quantised"],
)
def test_wrong_quantisation_in_the_config(
    tensors: dict[str, Tensors], load_model: Any, write: Any, config: str, content: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(write(CONFIGS[config], tensors[content]))


def test_missing_shard(folders: dict[str, Path], load_model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shards = sorted(folders["fp4"].glob("*.safetensors"))
    for file in folders["fp4"].iterdir():
        if file != shards[1]:
            (folder / file.name).symlink_to(file)
    with pytest.raises(FileNotFoundError, match=shards[1].name):  # vLLM's own check
        load_model(folder)
    (folder / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"missing \(\d+\):\n[^$]*is the download complete\?"):
        load_model(folder)


@pytest.mark.slow
def test_engine_with_a_faulty_checkpoint_names_all_faults_at_once(tensors: dict[str, Tensors], write: Any) -> None:
    content = dict(tensors["fp4"])
    for fault in ("missing", "unexpected", "misshapen", "bfloat16-for-fp8", "float32-for-e8m0"):
        FAULTS[fault][1](content)
    with pytest.raises(AssertionError) as error:
        run_engine(write(CONFIGS["fp4"], content), [Batch([[5]], 1)])
    message = str(error.value).replace("[rank0]: ", "")
    for kind, tensor in (
        ("missing", "layers.3.attn.compressor.ape"),
        ("unexpected", f"{LINEAR}.bias"),
        ("wrong shape", f"{LINEAR}.weight"),
        ("wrong dtype", f"{LINEAR}.weight"),
        ("wrong dtype", f"{EXPERT}.scale"),
    ):
        assert re.search(rf"^  {kind} \(\d\):\n(    .*\n)*    {tensor}", message, re.MULTILINE), message


# Checkpoints of every kind answer.

PROMPTS = [[0, 7, 300, 12], [0, *range(20, 160)]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pro-fp8", "0731", "bfloat16"])
def test_checkpoint_is_served(folders: dict[str, Path], name: str) -> None:
    (completions,) = run_engine(folders[name], [Batch(PROMPTS, new_tokens=4)], max_model_len=512).batches
    dense = DenseModel.from_checkpoint(folders[name])
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = dense.log_probs([*prompt, *completion.token_ids[:-1]], last=4)
        assert completion.token_ids == expected.argmax(-1).tolist()
        for row, logprobs in zip(expected, completion.logprobs, strict=True):
            # Both compute in float64 and round at the same places; vLLM's log-softmax is float32.
            assert all(abs(value - row[token].item()) < 1e-5 for token, value in logprobs.items())


@pytest.mark.slow
def test_dummy_weights_give_finite_numbers(folders: dict[str, Path]) -> None:
    (completions,) = run_engine(folders["fp4"], [Batch(PROMPTS, new_tokens=4)], load_format="dummy", max_model_len=512).batches
    for completion in completions:
        assert len(completion.token_ids) == 4 and all(0 <= token < 1024 for token in completion.token_ids)
        assert all(math.isfinite(value) for logprobs in completion.logprobs for value in logprobs.values())


# Caches.


@pytest.fixture
def caches(folders: dict[str, Path]) -> Any:
    """Makes the caches of a layer of the quantised model, by kind."""
    config = _vllm_config(folders["fp4"])
    factory = CacheFactory(Dsv4Config.from_hf(CONFIGS["fp4"]), config)
    kinds: dict[str, Callable[[], CacheLayer]] = {
        "window": lambda: factory.window("layers.0.window"),
        "entries-4": lambda: factory.entries("layers.2.entries", 4),
        "entries-128": lambda: factory.entries("layers.3.entries", 128),
        "indexer-keys": lambda: factory.indexer_keys("layers.2.keys", 4),
        "state-4": lambda: factory.compressor_state("layers.2.state", CompressorStateFormat(512, 4)),
        "state-128": lambda: factory.compressor_state("layers.3.state", CompressorStateFormat(512, 128)),
    }

    def make(kind: str) -> CacheLayer:
        with set_current_vllm_config(config):
            return kinds[kind]()

    return make


# Entries in a page, elements in an entry, dtype, and elements from page to page as vLLM aligns them (multiples of 576 bytes).
GEOMETRY: dict[str, tuple[int, int, torch.dtype, int]] = {
    "window": (64, 584, torch.uint8, 37440),
    "entries-4": (64, 584, torch.uint8, 37440),
    "entries-128": (2, 584, torch.uint8, 1728),
    "indexer-keys": (64, 132, torch.uint8, 8640),
    "state-4": (4, 2048, torch.float32, 32832 // 4),
    "state-128": (8, 1024, torch.float32, 32832 // 4),
}
PAGES = 3


def _pages(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(400_000, dtype=dtype).as_strided(size, stride)


@pytest.mark.parametrize("kind", GEOMETRY)
def test_caches_take_pages_of_their_geometry(caches: Any, kind: str) -> None:
    entries, entry, dtype, page = GEOMETRY[kind]
    cache = caches(kind)
    for stride in (page, 2 * page, entries * entry):  # beside other layers' pages, or alone
        cache.bind_kv_cache(_pages((PAGES, 1, entries, entry), (stride, entries * entry, entry, 1), dtype))
        assert cache.kv_cache.shape == (PAGES, entries, entry) and cache.kv_cache.stride() == (stride, entry, 1)


@pytest.mark.parametrize("kind", GEOMETRY)
def test_caches_refuse_other_pages(caches: Any, kind: str) -> None:
    entries, entry, dtype, page = GEOMETRY[kind]
    other_dtype = torch.int8 if dtype == torch.uint8 else torch.float16
    wrong = {
        "entries": ((PAGES, 1, entries * 2, entry), (2 * page, 2 * page, entry, 1), dtype),
        "entry": ((PAGES, 1, entries, entry - 4), (page, page, entry - 4, 1), dtype),
        "heads": ((PAGES, 2, entries, entry), (2 * page, page, entry, 1), dtype),
        "dtype": ((PAGES, 1, entries, entry), (page, page, entry, 1), other_dtype),
        "padded entries": ((PAGES, 1, entries, entry), (2 * page, page, entry + 8, 1), dtype),
        "transposed": ((PAGES, 1, entries, entry), (page, page, 1, entries), dtype),
        "no heads": ((PAGES, entries, entry), (page, entry, 1), dtype),
    }
    cache = caches(kind)
    for size, stride, wrong_dtype in wrong.values():
        with pytest.raises(ValueError, match=rf"cache '{cache.prefix}': expected pages \(1, {entries}, {entry}\) of {dtype} .* got"):
            cache.bind_kv_cache(_pages(size, stride, wrong_dtype))
    with pytest.raises(ValueError, match=rf"cache '{cache.prefix}': pages of {entries * entry} elements overlap"):
        cache.bind_kv_cache(_pages((PAGES, 1, entries, entry), (entries * entry - 16, page, entry, 1), dtype))
    assert cache.kv_cache.numel() == 0
