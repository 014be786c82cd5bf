"""The gateway of a namespace: OpenAI HTTP in, the right engine out."""
