"""Kubernetes adapters: the official client behind `paceline_api.kube.KubeClient`, and a list-and-watch reflector.

Operator and router both talk to the API through this package; neither imports the other. Everything here does I/O.
"""

from paceline_kube.client import ClusterUnreachable, OfficialKubeClient
from paceline_kube.reflector import Reflector

__all__ = ["ClusterUnreachable", "OfficialKubeClient", "Reflector"]
