"""The engine's API process: OpenAI endpoints, streaming, admission. Never imports torch."""
