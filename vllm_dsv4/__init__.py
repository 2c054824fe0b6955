"""DeepSeek-V4-Flash for stock vLLM, as an out-of-tree plugin."""

__version__ = "0.1.0"
