"""The API process: text, HTTP and server-sent events. Never imports torch; the core process has the model."""
