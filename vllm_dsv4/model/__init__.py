"""The model as vLLM runs it.

Registered through this package, so that vLLM's cache of model properties is keyed by all of its files.
"""

from vllm_dsv4.model.causal_lm import Dsv4ForCausalLM

__all__ = ["Dsv4ForCausalLM"]
