"""The ``vllm.general_plugins`` entry point.

vLLM calls ``register`` in the front end, the engine core, each worker and its model-inspection subprocess, so it is cheap,
may run twice, and touches no device.
"""

from __future__ import annotations

import logging

from vllm_dsv4 import envs

logger = logging.getLogger("vllm.vllm_dsv4")  # below vLLM's logger, so that its format and level apply

SUPPORTED_VLLM = ((0, 32), (0, 34))
"""vLLM releases from the first (included) to the second (excluded)."""

# The last is what vLLM makes of a checkpoint with a vision tower; it comes here to be refused with a clear message.
ARCHITECTURES = ("DeepseekV4ForCausalLM", "DeepseekV4FlashForCausalLM", "DeepseekV4ForConditionalGeneration")
MODEL_CLASS = "vllm_dsv4.model:Dsv4ForCausalLM"

_warned = False


def register() -> None:
    """Register the model, its quantisation and its option checks with vLLM; outside the version window only warn, once."""
    if envs.disabled():
        return
    import vllm

    if not is_supported(vllm.__version__) and not envs.forced():
        _warn_unsupported(vllm.__version__)
        return
    from vllm_dsv4 import compat
    from vllm_dsv4.engine_options import Dsv4EngineOptions
    from vllm_dsv4.quantization.config import Dsv4QuantConfig

    for architecture in ARCHITECTURES:
        compat.ModelRegistry.register_model(architecture, MODEL_CLASS)
        compat.MODELS_CONFIG_MAP[architecture] = Dsv4EngineOptions
    compat.register_quantization_config(Dsv4QuantConfig.NAME)(Dsv4QuantConfig)


def is_supported(version: str) -> bool:
    """Whether a vLLM version string lies in the supported window; development builds count as the release they precede."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return False
    return SUPPORTED_VLLM[0] <= (major, minor) < SUPPORTED_VLLM[1]


def _warn_unsupported(version: str) -> None:
    global _warned
    if not _warned:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED_VLLM)
        logger.warning(
            "vllm_dsv4 supports vLLM >=%s,<%s and stands aside for %s; VLLM_DSV4_FORCE=1 registers it all the same", low, high, version
        )
    _warned = True
