"""The OpenAI gateway of a namespace: authenticates, picks a replica, streams, judges each request once.

Imports `paceline_api` and `paceline_kube` only; never the operator, the engine or torch.
"""
