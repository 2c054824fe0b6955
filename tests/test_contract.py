"""What the package takes for granted about vLLM, read from vLLM's sources: no vLLM code runs.

Checked against the installed vLLM, and against the newest supported one where ``scripts/fetch_vllm_sources.py`` has unpacked it.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm_sources import Sources, has_decorator, signature_of

ROOT = Path(__file__).resolve().parent.parent
FETCHED = ROOT / ".cache" / "vllm-0.33.0" / "vllm"
OURS = Sources(ROOT / "vllm_dsv4")

CONFIG = "vllm.config"
ATTENTION = "vllm.v1.attention.backend"
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
LINEAR = "vllm.model_executor.layers.linear"
QUANTIZATION = "vllm.model_executor.layers.quantization"
PARALLEL = "vllm.distributed.parallel_state"

MEMBERS: dict[str, str] = {
    f"{CONFIG}:VllmConfig": "model_config cache_config parallel_config scheduler_config compilation_config attention_config "
    "lora_config speculative_config use_v2_model_runner",
    f"{CONFIG}:ModelConfig": "hf_config dtype max_model_len model_arch_config quantization enable_prompt_embeds disable_sliding_window",
    f"{CONFIG}.model_arch:ModelArchitectureConfig": "is_deepseek_mla",
    f"{CONFIG}:CacheConfig": "block_size user_specified_block_size cache_dtype",
    f"{CONFIG}:ParallelConfig": "tensor_parallel_size pipeline_parallel_size data_parallel_size enable_expert_parallel enable_eplb "
    "enable_dbo decode_context_parallel_size prefill_context_parallel_size",
    f"{CONFIG}:SchedulerConfig": "disable_hybrid_kv_cache_manager",
    f"{CONFIG}:SpeculativeConfig": "method",
    f"{CONFIG}:AttentionConfig": "indexer_kv_dtype",
    f"{CONFIG}:CompilationConfig": "static_forward_context cudagraph_mode max_cudagraph_capture_size",
    f"{CONFIG}.compilation:CUDAGraphMode": "PIECEWISE FULL_AND_PIECEWISE FULL_DECODE_ONLY",
    "vllm.forward_context:ForwardContext": "attn_metadata dp_metadata",
    "vllm.forward_context:DPMetadata": "num_tokens_across_dp_cpu",
    "vllm.platforms.interface:Platform": "is_cpu device_type",
    f"{PARALLEL}:GroupCoordinator": "rank_in_group local_rank world_size",
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": "block_size head_size dtype state_content_bytes tokens_per_state num_states",
    "vllm.v1.kv_cache_interface:SlidingWindowMLASpec": "block_size head_size dtype state_content_bytes sliding_window num_states",
    f"{ATTENTION}:CommonAttentionMetadata": "num_reqs num_actual_tokens max_seq_len query_start_loc seq_lens block_table_tensor "
    "slot_mapping",
    f"{ATTENTION}:AttentionMetadataBuilder": "layer_names _cudagraph_support reorder_batch_threshold",
    f"{FUSED_MOE}:FusedMoEConfig": "tp_size dp_size skip_final_all_reduce",
    f"{FUSED_MOE}:FusedMoEMethodBase": "moe",
    f"{FUSED_MOE}:MoERunner": "routed_experts",
    f"{FUSED_MOE}:RoutedExperts": "quant_method moe_config expert_map swiglu_limit",
    f"{FUSED_MOE}.router.base_router:BaseRouter": "top_k",
    f"{LINEAR}:LinearBase": "quant_method params_dtype",
}
"""Attributes that the package reads or sets, by the class that must have them."""

CALLS: dict[str, tuple[str, str]] = {
    f"{PARALLEL}:GroupCoordinator.dispatch": ("hidden_states topk_weights topk_ids is_sequence_parallel", ""),
    f"{PARALLEL}:GroupCoordinator.combine": ("hidden_states is_sequence_parallel", ""),
    f"{PARALLEL}:GroupCoordinator.all_gather": ("input_", "dim"),
    f"{PARALLEL}:GroupCoordinator.all_reduce": ("input_", ""),
    f"{PARALLEL}:GroupCoordinator.barrier": ("", ""),
    "vllm.model_executor.models.registry:_ModelRegistry.register_model": ("model_arch model_cls", ""),
    "vllm.model_executor.layers.logits_processor:LogitsProcessor.forward": ("lm_head hidden_states", ""),
    f"{FUSED_MOE}:MoERunner.forward": ("", "hidden_states router_logits input_ids"),
    f"{FUSED_MOE}:RoutedExperts.weight_loader": ("param loaded_weight weight_name", "shard_id expert_id return_success"),
}
"""Calls through objects: the parameters that we give by position, and those by keyword."""

OVERRIDDEN: dict[str, str] = {
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": "get_attn_backend get_kv_cache_spec bind_kv_cache",
    f"{ATTENTION}:AttentionBackend": "is_mla supported_kv_cache_layouts get_supported_kernel_block_sizes",
    f"{ATTENTION}:AttentionMetadataBuilder": "build",
    f"{FUSED_MOE}:FusedMoEMethodBase": "apply create_weights supports_internal_mk",
    f"{FUSED_MOE}.router.base_router:BaseRouter": "_compute_routing routing_method_type",
    f"{QUANTIZATION}.base_config:QuantizationConfig": "get_quant_method override_quantization_method from_config",
    f"{LINEAR}:LinearMethodBase": "apply create_weights process_weights_after_loading",
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod": "apply process_weights_after_loading",
    "vllm.model_executor.models.config:VerifyAndUpdateConfig": "verify_and_update_config verify_and_update_model_config",
}
"""Methods of ours that do nothing unless vLLM's base class has them, since nobody would call them."""

NOT_FROM_VLLM = {"GroupedOutputProjection.forward", "Gate.forward"}
"""Overriding methods that only the package itself calls, so that their parameters are its own affair."""

PROTOCOLS = {"Dsv4ForCausalLM": "vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration"}

PASSAGES: dict[str, tuple[str, ...]] = {
    "vllm.plugins": ('"vllm.general_plugins"', "VLLM_PLUGINS"),
    "vllm.config.model": ("MODELS_CONFIG_MAP", ".verify_and_update_model_config("),
    "vllm.config.vllm": ("MODELS_CONFIG_MAP", ".verify_and_update_config("),
    "vllm.config.cache": ('"fp8_ds_mla"',),
    # What a scale's parameter must be called, and say of itself, for the loader to slice it as it slices weights.
    f"{FUSED_MOE}.routed_experts": ('"weight_scale"', "FusedMoeWeightScaleSupported.BLOCK.value"),
}
"""Text that stands in vLLM where it acts on a name or a value of ours."""


@pytest.fixture(scope="module", params=["installed", "0.33.0"])
def vllm(request: pytest.FixtureRequest) -> Sources:
    if request.param != "installed":
        if not FETCHED.exists():
            pytest.skip(f"no sources of vLLM {request.param}; scripts/fetch_vllm_sources.py downloads them")
        return Sources(FETCHED)
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return Sources(Path(spec.submodule_search_locations[0]))


def imported_from_vllm() -> dict[str, str]:
    """``module:name`` of every name that ``compat.py`` imports."""
    imports = (node for node in ast.walk(OURS.tree("vllm_dsv4.compat")) if isinstance(node, ast.ImportFrom))
    return {
        alias.name: f"{node.module}:{alias.name}" for node in imports if (node.module or "").startswith("vllm.") for alias in node.names
    }


VLLM_NAMES = imported_from_vllm()


def our_classes() -> Iterator[tuple[str, ast.ClassDef, list[str]]]:
    """Our classes that derive from vLLM's: ``module:Class``, the definition, and vLLM's classes it derives from."""
    for module in OURS.modules():
        for definition in OURS.tree(module).body:
            if not isinstance(definition, ast.ClassDef):
                continue
            target = f"{module}:{definition.name}"
            bases = [ast.unparse(base) for _, ancestor in OURS.ancestry(target) for base in ancestor.bases]
            vllm_bases = [VLLM_NAMES[base] for base in bases if base in VLLM_NAMES]
            vllm_bases += [PROTOCOLS[definition.name]] if definition.name in PROTOCOLS else []
            if vllm_bases:
                yield target, definition, vllm_bases


def missing_names(vllm: Sources) -> list[str]:
    return [target for target in VLLM_NAMES.values() if vllm.find(*target.split(":")) is None]


def missing_members(vllm: Sources) -> list[str]:
    wanted = [(target, name) for table in (MEMBERS, OVERRIDDEN) for target, names in table.items() for name in names.split()]
    for module in OURS.modules():
        for node in ast.walk(OURS.tree(module)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in VLLM_NAMES:
                target = VLLM_NAMES[node.value.id]
                found = vllm.find(*target.split(":"))
                if found and isinstance(found[1], ast.ClassDef):
                    wanted.append((target, node.attr))
    return [f"{target} has no {name}" for target, name in wanted if name not in vllm.members(target)]


def misfit_calls(vllm: Sources) -> list[str]:
    problems = []
    for target, (by_position, by_keyword) in CALLS.items():
        signature, expected = vllm.signature(target), tuple(by_position.split())
        problems += [f"{target} {problem}" for problem in signature.problems(len(expected), set(by_keyword.split()))]
        if signature.positional[: len(expected)] != expected:
            problems.append(f"{target} takes {signature.positional}, not {expected}")
    for where, target, call in _calls():
        keywords = {keyword.arg for keyword in call.keywords if keyword.arg}
        complete = not any(isinstance(argument, ast.Starred) for argument in call.args) and None not in {k.arg for k in call.keywords}
        found = vllm.signature(target).problems(len(call.args), keywords, complete)
        problems += [f"{where}: {target} {problem}" for problem in found]
    return problems


def _calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Calls of what ``compat.py`` imports, and of the constructors of base classes: where, callee, call."""
    for module in OURS.modules():
        for node in ast.walk(OURS.tree(module)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in VLLM_NAMES:
                yield f"{module}:{node.lineno}", VLLM_NAMES[node.func.id], node
    for target, definition, bases in our_classes():
        for node in ast.walk(definition):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__" and (node.args or node.keywords):
                yield f"{target}:{node.lineno}", bases[0], node


def misfit_overrides(vllm: Sources) -> list[str]:
    classes = list(our_classes())
    parents = {ast.unparse(base) for _, definition, _ in classes for base in definition.bases}
    problems = []
    for target, definition, bases in classes:
        ours = OURS.methods(target)
        for base in bases:
            theirs = vllm.methods(base)
            abstract = {name for name, method in theirs.items() if has_decorator(method, "abstractmethod")}
            if definition.name not in parents and (missing := abstract - set(ours)):
                problems.append(f"{target} lacks {', '.join(sorted(missing))} of {base}")
            for name in set(ours) & set(theirs) - {"__init__"}:
                if f"{definition.name}.{name}" not in NOT_FROM_VLLM and (problem := _misfit(ours[name], theirs[name])):
                    problems.append(f"{target}.{name} {problem}, unlike {base}")
    return problems


def _misfit(ours: ast.FunctionDef, theirs: ast.FunctionDef) -> str | None:
    """Why ``ours`` cannot be called in every way that ``theirs`` can."""
    if has_decorator(ours, "property") != has_decorator(theirs, "property"):
        return "is or is not a property"
    mine, base = signature_of(ours, is_method=True), signature_of(theirs, is_method=True)
    if mine.positional[: len(base.positional)] != base.positional:
        return f"takes {mine.positional} for {base.positional}"
    unknown = set(base.keyword_only) - {*mine.positional, *mine.keyword_only}
    if (unknown or base.var_keyword) and not mine.var_keyword:
        return f"does not take {', '.join(unknown) or 'other keywords'}"
    required = mine.required - {*base.positional, *base.keyword_only}
    return f"also needs {', '.join(required)}" if required else None


def missing_passages(vllm: Sources) -> list[str]:
    return [f"{passage} in {module}" for module, passages in PASSAGES.items() for passage in passages if passage not in vllm.text(module)]


def test_names_exist(vllm: Sources) -> None:
    assert missing_names(vllm) == []


def test_members_exist(vllm: Sources) -> None:
    assert missing_members(vllm) == []


def test_calls_fit(vllm: Sources) -> None:
    assert misfit_calls(vllm) == []


def test_overriding_methods_take_what_vllm_passes(vllm: Sources) -> None:
    assert misfit_overrides(vllm) == []


def test_passages_exist(vllm: Sources) -> None:
    assert missing_passages(vllm) == []


class EditedSources(Sources):
    """vLLM as it would be after a change."""

    def __init__(self, original: Sources, module: str, old: str, new: str):
        super().__init__(original.package)
        self.original, self.module, self.old, self.new = original, module, old, new

    def text(self, module: str) -> str:
        text = self.original.text(module)
        return text.replace(self.old, self.new) if module == self.module else text

    def _tree(self, module: str) -> ast.Module:
        return super()._tree(module) if module == self.module else self.original.tree(module)


CHANGES: list[tuple[Callable[[Sources], list[str]], str, str, str, str]] = [
    (missing_names, "vllm.v1.kv_cache_layout", "class KVCacheLayout", "class Layout", "kv_cache_layout:KVCacheLayout"),
    (missing_names, FUSED_MOE, "FusedMoEFactory", "MoEFactory", "fused_moe:FusedMoEFactory"),
    (missing_names, PARALLEL, "def get_ep_group", "def ep_group", "vllm.distributed:get_ep_group"),
    (missing_members, "vllm.config.cache", "user_specified_block_size", "own_block_size", "CacheConfig has no user_specified_block_size"),
    (missing_members, "vllm.v1.kv_cache_layout", "BLHNC", "BLHCN", "KVCacheLayout has no BLHNC"),
    (missing_members, ATTENTION, "def supported_kv_cache_layouts", "def kv_layouts", "AttentionBackend has no supported_kv_cache_layouts"),
    (misfit_calls, "vllm.v1.kv_cache_interface", "state_content_bytes", "content_bytes", "MLAAttentionSpec has no parameter state_content"),
    (misfit_calls, f"{FUSED_MOE}.layer", "swiglu_limit", "limit", "FusedMoEFactory has no parameter swiglu_limit"),
    (misfit_calls, f"{FUSED_MOE}.router.base_router", "top_k: int,", "top_k: int, kind: str,", "BaseRouter also needs kind"),
    (misfit_calls, LINEAR, "return_bias: bool", "with_bias: bool", "ReplicatedLinear has no parameter return_bias"),
    (misfit_calls, PARALLEL, "is_sequence_parallel: bool = False,", "", "dispatch takes ("),
    (
        misfit_overrides,
        f"{FUSED_MOE}.fused_moe_method_base",
        "topk_ids: torch.Tensor",
        "ids: torch.Tensor",
        "Dsv4ExpertsMethod.apply takes",
    ),
    (misfit_overrides, f"{FUSED_MOE}.router.base_router", "*,\n", "*, mask=None,\n", "_compute_routing does not take mask"),
    (misfit_overrides, ATTENTION, "def is_mla", "@abstractmethod\n    def shape(cls): ...\n    def is_mla", "EntryBackend lacks shape of"),
    (misfit_overrides, f"{FUSED_MOE}.fused_moe_method_base", "@property\n    def supports_internal", "def supports_internal", "a property"),
    (missing_passages, "vllm.plugins", "vllm.general_plugins", "vllm.plugins", "vllm.general_plugins"),
]


@pytest.mark.parametrize(("check", "module", "old", "new", "problem"), CHANGES, ids=[change[4] for change in CHANGES])
def test_change_is_noticed(vllm: Sources, check: Callable[[Sources], list[str]], module: str, old: str, new: str, problem: str) -> None:
    assert old in vllm.text(module)
    assert any(problem in found for found in check(EditedSources(vllm, module, old, new)))


def test_ops_checkpoints_and_commands_do_not_import_vllm() -> None:
    packages = ("kernels", "reference", "checkpoint", "cli")
    alone = {"vllm_dsv4.config", "vllm_dsv4.ops", "vllm_dsv4.backend", "vllm_dsv4.quantization.formats"}
    modules = sorted(alone | {module for module in OURS.modules() if module.split(".")[1:2] and module.split(".")[1] in packages})
    code = f"import sys\nfor name in {modules}: __import__(name)\nassert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
