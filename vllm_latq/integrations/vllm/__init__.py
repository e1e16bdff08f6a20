"""The vLLM plugin: the only code that imports vLLM."""
