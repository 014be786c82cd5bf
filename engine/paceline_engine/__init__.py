"""The LLM engine: an API process that knows text and a core process that knows tokens, apart."""
